"""HTTP client of the local master; uses only the standard library, to import fast."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from dstrial.errors import MasterError, RequestError
from dstrial.master import owner_socket

_TIMEOUT_S = 60.0  # until the response of a request, except of streams


@dataclasses.dataclass(frozen=True, slots=True)
class Client:
    """Sends HTTP requests to one master, with a token or over the owner's UNIX socket."""

    address: str
    token: str = ""  # empty for public routes
    socket: str = ""  # path of the owner's UNIX socket; empty for TCP
    timeout_s: float = _TIMEOUT_S  # not applied to streams

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self.send("GET", path, query=query)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self.send("POST", path, body=body)

    def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the JSON object of the response.

        ``path`` starts with a slash. In ``query``, None omits a parameter and a list repeats it.

        Raises:
            RequestError: the master returned an error status.
            MasterError: the master is unreachable, or the connection was lost during the response. In the latter case, the
            request may have succeeded.
        """
        with self._response(method, path, query or {}, body, timeout_s=self.timeout_s) as response:
            text = response.read()
        try:
            value = json.loads(text) if text else {}
        except ValueError as error:
            raise self._no_master(repr(text[:80])) from error
        if not isinstance(value, dict):
            raise self._no_master(repr(text[:80]))
        return value

    def stream(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Yield the results of a streaming response; raises the errors of ``send``."""
        with self._response("GET", path, query, None, timeout_s=None) as response:
            for line in response:
                message = json.loads(line)
                if "error" in message:
                    raise RequestError(500, str(message["error"].get("message", message["error"])))
                yield message["result"]

    def extract(self, path: str, directory: Path) -> None:
        """Extract a tar.gz response into a directory; raises the errors of ``send``."""
        import tarfile

        with (
            self._response("GET", path, {}, None, timeout_s=None) as response,
            tarfile.open(fileobj=response, mode="r|gz") as tar,
        ):
            tar.extractall(directory, filter="data")

    @contextlib.contextmanager
    def _response(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float | None,
    ) -> Iterator[http.client.HTTPResponse]:
        url = urlsplit(self.address)
        words = urlencode({name: value for name, value in query.items() if value is not None}, doseq=True)
        target = f"{url.path}{path}" + (f"?{words}" if words else "")
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = None if body is None else json.dumps(body).encode()
        # The master listens on 127.0.0.1 only, but localhost may resolve to ::1 first.
        host = "127.0.0.1" if url.hostname == "localhost" else str(url.hostname)
        connection = (
            _UnixConnection(self.socket, timeout_s)
            if self.socket
            else http.client.HTTPConnection(host, url.port or 80, timeout=timeout_s)
        )
        try:
            try:
                connection.request(method, target, body=data, headers={"Host": url.netloc, **headers})
                response = connection.getresponse()
            except TimeoutError as error:
                raise MasterError(
                    f"{self.address} has not answered {path} within {timeout_s} s; expected an answer. See whether the master is "
                    "stopped or hangs with `dstrial status`."
                ) from error
            except (OSError, http.client.HTTPException) as error:
                raise self._no_master(str(error) or type(error).__name__) from error
            try:
                if response.status >= 300:
                    raise RequestError(response.status, _error_text(response.read(), response.reason))
                yield response
            except (OSError, http.client.HTTPException) as error:
                raise MasterError(
                    f"the connection to {self.address} was lost ({error or type(error).__name__}); expected the rest of "
                    f"{path}. See whether the master runs with `dstrial status`."
                ) from error
        finally:
            connection.close()

    def _no_master(self, got: str) -> MasterError:
        return MasterError(
            f"the answer of {self.address} is {got}; expected that of a master. Start one with `dstrial up`."
        )


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float | None) -> None:
        super().__init__("localhost")
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = owner_socket.connect(self._path, self._timeout_s)


def _error_text(body: bytes, reason: str) -> str:
    """Return the message in an error response; without one, the body or ``reason``."""
    try:
        value = json.loads(body)
        error = value.get("error") or {}
        if isinstance(error, str):
            return error
        return str(value.get("message") or error.get("message") or error.get("error") or reason)
    except (ValueError, AttributeError):
        return body.decode(errors="replace").strip() or reason
