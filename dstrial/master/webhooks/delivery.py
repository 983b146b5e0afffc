"""Send webhook events in threads, with retries; a slow receiver delays no other.

Redirects are not followed, and only the status of the response is used. Proxies of the master's environment (``HTTPS_PROXY``,
``NO_PROXY``) are used, except for loopback addresses.

Signatures are the hexadecimal HMAC-SHA256 of the time in whole seconds, a comma and the body. Source: Determined 0.38.1
``master/internal/webhooks/shipper.go``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import http.client
import json
import logging
import random
import secrets
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
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


logger = logging.getLogger("dstrial.master.webhooks")

# Headers with the time and the signature of a request.
TIMESTAMP_HEADER = "X-Determined-AI-Signature-Timestamp"
SIGNATURE_HEADER = "X-Determined-AI-Signature"

TIMEOUT_S = 10.0  # per attempt, from connecting to the response's status

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_TOO_MANY = 429  # HTTP status that asks for a later attempt
_MAX_RESULT = 200  # characters of an error's text
_MAX_THREADS = 64  # concurrent requests, including requests that were abandoned at a timeout
_POLL_S = 0.1  # period of checks whether an attempt or a thread has ended

RETRY_S = (1.0, 10.0)
"""Backoff before the second and third attempt, in seconds, with a jitter of 50 %.

Determined's three attempts take at most four seconds (``backoffAttempts`` in ``shipper.go``), which is less than the restart of a
receiver takes."""

_IDLE_S = 60.0  # longest wait between two polls of the queue; a new event ends it
_BACKOFF_S = 60.0  # backoff after a local error, for example a full disk


@dataclasses.dataclass(frozen=True, slots=True)
class DeliveryResult:
    """The result of one attempt to deliver an event."""

    result: str  # text for users, for example "HTTP 200"
    is_delivered: bool
    may_retry: bool


class Sender:
    """Sends requests, each in a daemon thread that is abandoned after ``timeout_s``.

    Socket timeouts are not enough, as they restart at each byte that a slow receiver sends.
    """

    def __init__(self, key: str, timeout_s: float = TIMEOUT_S) -> None:
        self._key = key
        self._timeout_s = timeout_s
        self._threads = threading.BoundedSemaphore(_MAX_THREADS)
        self._ended = threading.Event()

    def post(self, url: str, body: bytes) -> DeliveryResult | None:
        """Make one attempt to send a signed JSON body, and return its result.

        Returns None if the master shuts down. If too many earlier requests hang, nothing is sent, and the result allows a
        retry.
        """
        if self._ended.is_set():
            return None
        if not self._threads.acquire(blocking=False):
            return DeliveryResult(f"not sent: {_MAX_THREADS} receivers hang", False, True)
        results: list[DeliveryResult] = []

        def attempt() -> None:
            try:
                results.append(self._attempt(url, body))
            finally:
                self._threads.release()

        thread = threading.Thread(target=attempt, name="dstrial-webhook", daemon=True)
        thread.start()
        deadline_s = time.monotonic() + self._timeout_s
        while thread.is_alive() and time.monotonic() < deadline_s and not self._ended.is_set():
            thread.join(_POLL_S)
        if results:
            return results[0]
        # The shutdown itself may be the cause of a failure, which therefore does not count.
        return None if self._ended.is_set() else self._timed_out()

    def end(self) -> None:
        self._ended.set()

    def _timed_out(self) -> DeliveryResult:
        return DeliveryResult(f"no answer within {self._timeout_s:g} s", False, True)

    def _attempt(self, url: str, body: bytes) -> DeliveryResult:
        request = _request(url, body, self._key)
        # No handlers for redirects, errors, files or ftp, so these cannot happen.
        opener = urllib.request.OpenerDirector()
        opener.add_handler(urllib.request.HTTPHandler())
        opener.add_handler(urllib.request.HTTPSHandler())
        if urlsplit(url).hostname not in _LOOPBACK:
            opener.add_handler(urllib.request.ProxyHandler())
        try:
            answer = opener.open(request, timeout=self._timeout_s)
            if answer is None:
                raise ValueError("the address is neither http nor https")
            with answer:
                return _result_of(answer.status)
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, TimeoutError):
                return self._timed_out()
            # The message may quote the receiver's response.
            text = visible_line(str(cause) or type(cause).__name__)
            return DeliveryResult(text[:_MAX_RESULT], False, True)


def load_key(path: Path) -> str:
    """Return the signing key of webhooks in file ``path``; create a missing file.

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


def send_event(services: Services, url: str, kind: str, event: Mapping[str, Any]) -> DeliveryResult | None:
    """Make one attempt to send a stored event, and return the attempt's result.

    Returns None if the master shuts down. ``kind`` is the webhook's type, SLACK or DEFAULT.
    """
    settings = services.settings
    body = body_of(event, kind, node=services.agent_id, pool=settings.pool_name, base_url=settings.base_url)
    return services.webhook_sender.post(url, body)


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


class Delivery:
    """Sends queued events; each webhook has at most one thread, which sends one event.

    Delivery is at least once: after a crash of the master, an event may be sent again, with the same ``event_id``.
    """

    def __init__(self, services: Services, retry_s: Sequence[float] = RETRY_S) -> None:
        self._services = services
        self._database = services.database
        self._retry_s = tuple(retry_s)
        self._event = services.pubsub.listen(webhooks.EVENTS_TOPIC)
        self._sending: dict[int, threading.Thread] = {}  # webhook id -> thread that sends its first event
        self._is_draining = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dstrial-webhooks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float) -> None:
        """Send due events for at most ``drain_s`` seconds, then stop; others stay queued."""
        if self._thread.ident is None:
            return
        self._is_draining = True
        self._event.set()
        self._thread.join(drain_s)
        self._stopping.set()
        self._event.set()
        self._services.webhook_sender.end()
        self._thread.join()
        for thread in self._sending.values():
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
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
        """Start threads that send due events.

        Returns the seconds until the next call, and whether any thread sends now.
        """
        self._sending = {number: thread for number, thread in self._sending.items() if thread.is_alive()}
        with self._database.read() as connection:
            rows = [row for row in webhooks.next_events(connection) if row.webhook_id not in self._sending]
        now = now_us()
        for row in rows:
            if row.due_us <= now:
                thread = threading.Thread(target=self._send, args=(row,), name="dstrial-webhook", daemon=True)
                self._sending[row.webhook_id] = thread
                thread.start()
        waits_s = [(row.due_us - now) / 1e6 for row in rows if row.due_us > now]
        return min([_POLL_S if self._sending else _IDLE_S, *waits_s]), bool(self._sending)

    def _send(self, row: webhooks.DueEvent) -> None:
        try:
            self._attempt(row)
        except Exception:
            logger.exception("sending an event of webhook %d failed; it will be retried", row.webhook_id)
            self._stopping.wait(_BACKOFF_S)  # without a stored result the event is retried

    def _attempt(self, row: webhooks.DueEvent) -> None:
        started_s = time.monotonic()
        outcome = send_event(self._services, row.url, row.type, json.loads(row.event))
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
