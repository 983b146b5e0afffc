"""HTTP client for webhooks, with a total deadline per request.

It connects only to the given URL (http or https), does not follow redirects, and uses only the status of the response.
Proxies of the master's environment (``HTTPS_PROXY``, ``NO_PROXY``) are used, except for loopback addresses.

Signatures are as in Determined 0.38.1 ``master/internal/webhooks/shipper.go``: the hexadecimal HMAC-SHA256 of the time in
whole seconds, a comma and the body.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import http.client
import secrets
import socket
import ssl
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import URLError
from urllib.parse import unquote, urlsplit

from dstrial.errors import MasterError
from dstrial.file_writes import make_file
from dstrial.visible_text import visible_line

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
    """Shuts down all connections of an attempt at its deadline.

    Socket timeouts restart at each byte, so a receiver that sends a byte every few seconds could block a thread forever.
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
    """Its ``connect`` runs ``_HttpConnection.connect``, then the TLS handshake."""


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
        """Send a signed JSON body once; None if the master shut down before the response."""
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
        # During shutdown only a complete response counts.
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


def load_key(path: Path, configured: str | None) -> str:
    """Return the configured signing key, else the one in ``path``, created if missing.

    Raises:
        MasterError: the file cannot be read or created, or is empty.
    """
    if configured is not None:
        return configured
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
