"""A real HTTP server that records what webhooks send it, and checks signatures as Determined's documentation shows."""

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
    """By their names in small letters."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def is_signed_with(self, key: str) -> bool:
        """Check it as Determined 0.38.1 tells receivers to: by the body, serialised anew without spaces.

        Source: its ``docs/integrations/notification/_index.rst``.
        """
        anew = json.dumps(json.loads(self.body), separators=(",", ":"))
        signed = ",".join((self.headers["x-determined-ai-signature-timestamp"], anew)).encode()
        expected = hmac.digest(key.encode(), signed, hashlib.sha256).hex()
        return hmac.compare_digest(expected, self.headers["x-determined-ai-signature"])


class Receiver:
    """Answers POST requests.

    Attributes:
        received: what has come, in order.
        statuses: of the next answers; 200 when there is none left.
        location: of redirects.
        hangs: whether requests are not answered until the server is closed.
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
        """Return what has come, as soon as there is so much of it."""
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
