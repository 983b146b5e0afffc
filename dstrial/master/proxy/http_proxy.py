"""The application in front of the API, which streams proxied paths to services.

Requests of the proxy are held to the same rules as those of the API: a loopback name, a user's token or the cookie of the
master's own page. The token itself never reaches a service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import httptools
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstrial.errors import RequestError
from dstrial.master.http import access
from dstrial.master.http.errors import error_response, status_and_text
from dstrial.master.http.peers import lift_body_deadline
from dstrial.master.proxy import targets as named
from dstrial.master.services import Services
from dstrial.master.web.page import ended_page, login_page, task_state, waiting_page

logger = logging.getLogger("dstrial.master.proxy")

INTERACTIVE = "/det/interactive/"
"""What ``det tensorboard start`` and ``open`` open in the browser: a page that waits, and goes to the service."""
_CHUNK_BYTES = 64 * 1024


class ProxyMiddleware:
    """Answers requests of the proxy, and hands the others on."""

    def __init__(self, services: Services, api: ASGIApp) -> None:
        self._services = services
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or not path.startswith((named.PREFIX, INTERACTIVE)):
            await self._api(scope, receive, send)
            return
        # The boundary of a request: what went wrong is told to the log, and to the client only if it is to blame.
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            response = await self._answer(scope, receive, watched)
        except ServiceGoneError:
            # The server closes a connection whose answer is not complete.
            return
        except Exception as error:
            if has_begun:
                raise
            problem = status_and_text(error)
            if problem.status >= 500 and problem.status != 503:
                logger.exception("%s %s is answered %d", scope["method"], path, problem.status)
            response = error_response(problem)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        headers = Headers(scope=scope)
        access.check_host_and_origin(headers)
        is_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        changes_nothing = scope["method"] in ("GET", "HEAD", "OPTIONS")
        try:
            identity = await access.identify(
                self._services, headers, "GET" if changes_nothing else scope["method"]
            )
        except RequestError as error:
            if error.status == 401 and is_page:
                return login_page(self._services, 401)
            raise
        if identity.allocation is not None:
            raise RequestError(
                403,
                "an allocation's token does not open the proxy; expected a user's. Use DET_USER_TOKEN in a task.",
            )
        raw = scope["raw_path"].split(b"?", 1)[0].decode("latin-1")
        if raw.startswith(INTERACTIVE):
            return await self._interactive(raw)
        name = named.service_of(raw)
        service = await self._services.read(named.find, name)
        self._services.activity.touch(service.task_id)
        if "/" not in raw[len(named.PREFIX) :]:
            return RedirectResponse(f"{raw}/", status_code=307)
        if not service.is_ready and is_page:
            return waiting_page(service.task_id)
        await proxy_request(service, scope, receive, send)
        self._services.activity.touch(service.task_id)
        return None

    async def _interactive(self, raw: str) -> Response:
        task_id = raw[len(INTERACTIVE) :].partition("/")[0]
        state = await self._services.read(task_state, task_id)
        if state == "ready":
            return RedirectResponse(f"{named.PREFIX}{task_id}/", status_code=307)
        if state == "ended":
            return ended_page(task_id)
        return waiting_page(task_id)


class ServiceGoneError(Exception):
    """The service has closed its connection in the middle of an answer."""


class _Answer:
    """What httptools reads of an answer."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.has_head = False
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


async def proxy_request(service: named.Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Hand a request to a service and its answer to the client.

    Raises:
        RequestError: 503, nobody answers at its port (yet).
        ServiceGoneError: it goes away after its answer has begun.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    except OSError as error:
        raise RequestError(
            503,
            f"port {service.port} of task {service.task_id} does not answer; expected its service. Try again soon.",
        ) from error
    # How fast a body has to come is the service's matter; whoever sends it has logged in.
    lift_body_deadline(scope)
    sending = asyncio.ensure_future(_send_request(writer, scope, receive))
    answering = asyncio.ensure_future(_pass_answer(reader, scope, send))
    try:
        # A service may answer before it has read the whole request, and a client may leave before the end.
        await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done() and not await sending:
            leaving = asyncio.ensure_future(_until_gone(receive))
            await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
        if answering.done():
            answering.result()
    finally:
        for task in (sending, answering):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError, RequestError, ServiceGoneError):
                await task
        writer.close()


async def _send_request(writer: asyncio.StreamWriter, scope: Scope, receive: Receive) -> bool:
    """Send the request, and say whether the client has left meanwhile."""
    target = scope["raw_path"].split(b"?", 1)[0]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    names = {name for name, _ in scope["headers"]}
    is_chunked = b"transfer-encoding" in names
    head = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    head += [b"%b: %b" % header for header in named.forwarded(scope["headers"])]
    head += [b"connection: close", *([b"transfer-encoding: chunked"] if is_chunked else []), b"", b""]
    with contextlib.suppress(OSError):
        writer.write(b"\r\n".join(head))
        while True:
            event: Message = await receive()
            if event["type"] == "http.disconnect":
                return True
            body = event.get("body", b"")
            if body:
                writer.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)
                await writer.drain()
            if not event.get("more_body", False):
                break
        if is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
    return False


async def _pass_answer(reader: asyncio.StreamReader, scope: Scope, send: Send) -> None:
    answer = _Answer()
    parser = httptools.HttpResponseParser(answer)
    is_begun = False
    while not answer.is_complete:
        try:
            data = await reader.read(_CHUNK_BYTES)
        except OSError as error:
            raise _broken(is_begun, "cut off") from error
        if data:
            try:
                parser.feed_data(data)
            except httptools.HttpParserError as error:
                raise _broken(is_begun, "no HTTP") from error
        if answer.has_head and not is_begun:
            is_begun = True
            start = {"status": parser.get_status_code(), "headers": named.answered(answer.headers)}
            await send({"type": "http.response.start", **start})
            if scope["method"] == "HEAD":
                break
        if answer.body:
            await send({"type": "http.response.body", "body": b"".join(answer.body), "more_body": True})
            answer.body.clear()
        if not data:
            break
    if not is_begun:
        raise _broken(is_begun, "nothing")
    tells_its_end = any(
        name.lower() == b"content-length"
        or (name.lower() == b"transfer-encoding" and b"chunked" in value.lower())
        for name, value in answer.headers
    )
    if tells_its_end and not answer.is_complete and scope["method"] != "HEAD":
        raise ServiceGoneError
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _broken(is_begun: bool, got: str) -> Exception:
    if is_begun:
        return ServiceGoneError()
    return RequestError(
        503, f"the answer of the task's service is {got}; expected HTTP. Try again, or see its log."
    )


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
