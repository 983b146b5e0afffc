"""Send webhook events in threads, with retries; a slow receiver delays no others.

Redirects are not followed, and only the status of the response is used. Proxies of the master's environment (``HTTPS_PROXY``,
``NO_PROXY``) are used, except for loopback addresses.

Signatures are the hexadecimal HMAC-SHA256 of the time in whole seconds, a comma and the body. Source: Determined 0.38.1
``master/internal/webhooks/shipper.go``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import http.client
import json
import logging
import random
import secrets
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit

from dstrial.errors import MasterError
from dstrial.file_writes import make_file
from dstrial.master.clock import now_us
from dstrial.master.store import webhooks
from dstrial.master.webhooks.payloads import body_of
from dstrial.visible_text import visible_line

if TYPE_CHECKING:
    from dstrial.master.services import Services


TIMESTAMP_HEADER = "X-Determined-AI-Signature-Timestamp"
SIGNATURE_HEADER = "X-Determined-AI-Signature"

TIMEOUT_S = 10.0  # per attempt, from connecting to the response's status

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOO_MANY = 429
_MAX_RESULT = 200


@dataclasses.dataclass(frozen=True, slots=True)
class DeliveryResult:
    result: str
    is_delivered: bool
    may_retry: bool


class Deadline:
    """Context manager that shuts down all watched connections at a deadline.

    Socket timeouts are not enough, as they restart at each byte that a slow receiver sends.
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(timeout_s, self.end)
        self._timer.daemon = True

    def __enter__(self) -> Deadline:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets.clear()

    def watch(self, connected: socket.socket) -> None:
        with self._lock:
            # Duplicate the descriptor, because TLS detaches the original socket.
            self._sockets.append(connected.dup())
        if self.is_over:
            self.end()

    def end(self) -> None:
        with self._lock:
            self.is_over = True
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


class _HttpConnection(http.client.HTTPConnection):
    deadline: Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)


class _TlsConnection(http.client.HTTPSConnection, _HttpConnection):
    """HTTPS connection that a ``Deadline`` can shut down, also in the TLS handshake."""


def _connection(
    kind: type[_HttpConnection], deadline: Deadline, *args: Any, **kwargs: Any
) -> _HttpConnection:
    made = kind(*args, **kwargs)
    made.deadline = deadline
    return made


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https URLs with connections that a ``Deadline`` can shut down."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline
        self.http_request = self.https_request = self.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(functools.partial(_connection, _HttpConnection, self._deadline), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        connect = functools.partial(
            _connection, _TlsConnection, self._deadline, context=ssl.create_default_context()
        )
        return self.do_open(connect, request)


class Sender:
    def __init__(self, key: str, timeout_s: float = TIMEOUT_S) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: set[Deadline] = set()
        self._ended = threading.Event()

    def post(self, url: str, body: bytes) -> DeliveryResult | None:
        """Send a signed JSON body once; return the result, or None during a shutdown."""
        deadline = Deadline(self._timeout_s)
        with self._lock:
            if self._ended.is_set():
                return None
            self._open.add(deadline)
        try:
            with deadline:
                outcome = self._attempt(url, body, deadline)
        finally:
            with self._lock:
                self._open.discard(deadline)
        # The shutdown itself may be the cause of a failure, which therefore does not count.
        return None if self._ended.is_set() and not outcome.is_delivered else outcome

    def end(self) -> None:
        with self._lock:
            self._ended.set()
            for deadline in self._open:
                deadline.end()

    def _attempt(self, url: str, body: bytes, deadline: Deadline) -> DeliveryResult:
        timed_out = DeliveryResult(f"no answer within {self._timeout_s:g} s", False, True)
        try:
            with self._open_url(_request(url, body, self._key), deadline) as answer:
                # Headers truncated by the deadline would be parsed as complete.
                return timed_out if deadline.is_over else _result_of(answer.status)
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if deadline.is_over or isinstance(cause, TimeoutError):
                return timed_out
            # The message may quote the receiver's response.
            text = visible_line(str(cause) or type(cause).__name__)
            return DeliveryResult(text[:_MAX_RESULT], False, True)

    def _open_url(self, request: urllib.request.Request, deadline: Deadline) -> http.client.HTTPResponse:
        # No handlers for redirects, errors, files or ftp, so these cannot happen.
        opener = urllib.request.OpenerDirector()
        opener.add_handler(_Handler(deadline))
        if urlsplit(request.full_url).hostname not in _LOOPBACK:
            opener.add_handler(urllib.request.ProxyHandler())
        answer = opener.open(request, timeout=self._timeout_s)
        if answer is None:
            raise ValueError("the address is neither http nor https")
        assert isinstance(answer, http.client.HTTPResponse)
        return answer


def load_key(path: Path) -> str:
    """Return the signing key in file ``path``.

    A missing file is created with a new key.

    Raises:
        MasterError: the file cannot be read or created, or is empty.
    """
    try:
        with contextlib.suppress(FileExistsError):
            make_file(path, f"{secrets.token_hex(32)}\n")
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise MasterError(
            f"the key of webhooks {path} cannot be used ({error}); expected a file that its owner can read. Remove it to "
            "have another made."
        ) from error
    if not key:
        raise MasterError(
            f"the key of webhooks {path} is empty; expected a key. Remove it to have another made."
        )
    return key


def signature(key: str, timestamp_s: int, body: bytes) -> str:
    return hmac.new(key.encode(), f"{timestamp_s},".encode() + body, hashlib.sha256).hexdigest()


def _request(url: str, body: bytes, key: str) -> urllib.request.Request:
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json; charset=UTF-8", "User-Agent": "dstrial"}
    credentials, _, host = parts.netloc.rpartition("@")
    if credentials:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(credentials).encode()).decode()
    now = int(time.time())
    headers[TIMESTAMP_HEADER] = str(now)
    headers[SIGNATURE_HEADER] = signature(key, now, body)
    return urllib.request.Request(  # noqa: S310 - the opener knows http and https only
        parts._replace(netloc=host, fragment="").geturl(), data=body, headers=headers, method="POST"
    )


def _result_of(status: int) -> DeliveryResult:
    if status < 300:
        return DeliveryResult(f"HTTP {status}", True, False)
    if status < 400:
        return DeliveryResult(f"HTTP {status}, a redirect, which is not followed", False, False)
    return DeliveryResult(f"HTTP {status}", False, status >= 500 or status == _TOO_MANY)


logger = logging.getLogger("dstrial.master.webhooks")

RETRY_S = (1.0, 10.0)
"""Backoff before the second and third attempt, seconds, with a jitter of 50 %. Determined's three attempts take at most
four seconds (``backoffAttempts`` in ``shipper.go``), less than the restart of a receiver."""

_NUM_SENDERS = 8
_IDLE_S = 60.0
_BACKOFF_S = 60.0  # backoff after a local error, for example a full disk


class Delivery:
    """Sends queued events, one at a time per webhook.

    Delivery is at least once: after a crash of the master, an event may be sent again, with the same ``event_id``.
    """

    def __init__(self, services: Services, retry_s: Sequence[float] = RETRY_S) -> None:
        self._services = services
        self._database = services.database
        self._retry_s = tuple(retry_s)
        self._event = services.pubsub.listen(webhooks.EVENTS_TOPIC)
        self._senders = ThreadPoolExecutor(_NUM_SENDERS, thread_name_prefix="dstrial-webhook")
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._not_before_us: dict[int, int] = {}
        self._is_draining = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="dstrial-webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Send due events for at most ``drain_s``, then stop; unsent events stay queued."""
        if self._thread.ident is None:
            return
        self._is_draining = True
        self._event.set()
        self._thread.join(drain_s)
        self._is_stopping = True
        self._event.set()
        self._services.webhook_sender.end()
        self._thread.join()
        self._senders.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        while not self._is_stopping:
            is_any_due = False
            try:
                wait_s, is_any_due = self._start_due()
            except Exception:
                logger.exception("webhook delivery failed and will be retried")
                wait_s = _BACKOFF_S
            if self._is_draining and not is_any_due:
                return
            self._event.wait(wait_s)
            self._event.clear()

    def _start_due(self) -> tuple[float, bool]:
        """Start sending due events; return (seconds to next poll, whether any was due)."""
        with self._database.read() as connection:
            rows = webhooks.next_events(connection)
        next_us = now_us() + int(_IDLE_S * 1e6)
        is_any_due = False
        for row in rows:
            with self._lock:
                if row.webhook_id in self._busy:
                    is_any_due = True
                    continue
                due_us = max(row.due_us, self._not_before_us.get(row.webhook_id, 0))
                is_due = due_us <= now_us() and len(self._busy) < _NUM_SENDERS
                if is_due:
                    self._busy.add(row.webhook_id)
            if is_due:
                self._senders.submit(self._send, row)
            elif due_us > now_us():
                next_us = min(next_us, due_us)
                continue
            is_any_due = True
        return max(0.0, (next_us - now_us()) / 1e6), is_any_due

    def _send(self, row: webhooks.DueEvent) -> None:
        try:
            self._attempt(row)
        except Exception:
            logger.exception("sending an event of webhook %d failed; it will be retried", row.webhook_id)
            # Without a stored result the event is retried.
            self._not_before_us[row.webhook_id] = now_us() + int(_BACKOFF_S * 1e6)
        finally:
            with self._lock:
                self._busy.discard(row.webhook_id)
            self._event.set()

    def _attempt(self, row: webhooks.DueEvent) -> None:
        services = self._services
        body = body_of(
            json.loads(row.event),
            row.type,
            node=services.agent_id,
            pool=services.settings.pool_name,
            base_url=services.settings.base_url,
        )
        started_s = time.monotonic()
        outcome = services.webhook_sender.post(row.url, body)
        if outcome is None:
            return
        retry_us = None
        if not outcome.is_delivered:
            waits = self._retry_s[row.num_attempts :]
            if outcome.may_retry and waits:
                retry_us = now_us() + int(waits[0] * random.uniform(0.5, 1.5) * 1e6)
            # Do not log the URL, which may be a secret.
            logger.warning(
                "webhook %d: %s after %.1f s; event %d %s",
                row.webhook_id,
                outcome.result,
                time.monotonic() - started_s,
                row.id,
                "is dropped" if retry_us is None else "will be retried",
            )
        self._database.write(
            lambda tx: webhooks.note_result(
                tx,
                row.webhook_id,
                row.id,
                outcome.result,
                is_delivered=outcome.is_delivered,
                retry_us=retry_us,
            )
        )
