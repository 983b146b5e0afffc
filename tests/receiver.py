"""An HTTP server that records webhook requests and checks their signatures."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from waiting import wait_for


@dataclasses.dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    """Values by lower-case header name."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def is_signed_with(self, key: str) -> bool:
        """Return whether the signature matches the body re-serialised without spaces.

        Determined 0.38.1 documents this check in ``docs/integrations/notification/_index.rst``.
        """
        anew = json.dumps(json.loads(self.body), separators=(",", ":"))
        signed = ",".join((self.headers["x-determined-ai-signature-timestamp"], anew)).encode()
        expected = hmac.digest(key.encode(), signed, hashlib.sha256).hex()
        return hmac.compare_digest(expected, self.headers["x-determined-ai-signature"])


class Receiver:
    """Records requests and answers them with configurable responses.

    Attributes:
        received: the requests in order of arrival.
        statuses: status codes of the next responses; 200 if the list is empty.
        location: ``Location`` header of redirects; empty for none.
        hangs: whether requests stay unanswered until the server is closed.
    """

    def __init__(self, port: int = 0) -> None:
        self.received: list[Received] = []
        self.statuses: list[int] = []
        self.location = ""
        self.hangs = False
        self._released = threading.Event()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._answer(self)

            do_GET = do_POST  # noqa: N815 - the name that the base class calls

            def log_message(self, *words: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.received.append(Received(handler.path, headers, body))
        if self.hangs:
            self._released.wait()
            return
        handler.send_response(self.statuses.pop(0) if self.statuses else 200)
        if self.location:
            handler.send_header("Location", self.location)
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.write(b"ok")

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=b"

    def wait(self, count: int = 1) -> list[Received]:
        """Wait until ``count`` requests have arrived, and return all requests so far."""
        wait_for(lambda: len(self.received) >= count, f"{len(self.received)} of {count} requests have come")
        return list(self.received)

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    receiver = Receiver(port)
    try:
        yield receiver
    finally:
        receiver.close()
