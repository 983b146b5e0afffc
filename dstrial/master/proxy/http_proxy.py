"""ASGI middleware that proxies requests to services of tasks.

Requests with a token in a header are proxied on the master's host name. A browser with a cookie is redirected to the task's
host name, with a one-time code that grants access to this task's services only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import h11
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dstrial.errors import RequestError
from dstrial.master.http import access
from dstrial.master.http.connection import connection_of
from dstrial.master.http.responses import error_response, problem_of
from dstrial.master.proxy import targets
from dstrial.master.services import Services
from dstrial.master.web.page import ended_page, login_page, service_state, waiting_page

logger = logging.getLogger("dstrial.master.proxy")

INTERACTIVE = "/det/interactive/"
"""URL path that ``det tensorboard start`` and ``open`` open in the browser; waits for the service, then redirects."""
_GRANT = "dstrial-grant="  # query parameter with the one-time code of ``ServiceGrants``
_CHUNK_BYTES = 4 * 1024  # per read: at most some hundred HTTP events, which block the event loop for 30 ms
_MAX_HEAD_BYTES = 64 * 1024  # of a service's response
_STATUSES = range(200, 600)  # that a service may respond with


class ProxyMiddleware:
    """ASGI middleware: proxies requests for tasks' services, passes others to the API."""

    def __init__(self, services: Services, api: ASGIApp) -> None:
        self._services = services
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", ""))
        if scope["type"] != "http" or not path.startswith((targets.PREFIX, INTERACTIVE)):
            await self._api(scope, receive, send)
            return
        # Request boundary: log every exception; tell the client the cause only of client errors.
        response_started = False

        async def watched(message: Message) -> None:
            nonlocal response_started
            response_started = True
            await send(message)

        try:
            response = await self._answer(scope, receive, watched)
        except Exception as error:
            if response_started:
                if isinstance(error, RequestError):
                    # uvicorn closes a connection whose response is incomplete.
                    return
                raise
            problem = problem_of(error)
            if problem.status >= 500 and not isinstance(error, RequestError):
                logger.exception("%s %s is answered %d", scope["method"], path, problem.status)
            response = error_response(problem)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Response | None:
        headers = Headers(scope=scope)
        raw = scope["raw_path"].split(b"?", 1)[0].decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        host_task = targets.task_of_host(headers)
        if host_task is not None and _GRANT in query:
            return self._take_grant(raw, query, host_task)
        is_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
        method = "GET" if scope["method"] in ("GET", "HEAD", "OPTIONS") else scope["method"]
        try:
            if raw.startswith(INTERACTIVE):
                await access.identify(self._services, headers, method)
                return await self._interactive(raw)
            service = await targets.find(self._services, headers, method, raw)
        except RequestError as error:
            if error.status != 401 or not is_page:
                raise
            if host_task is None:
                return login_page(self._services, 401)
            return RedirectResponse(f"http://localhost{_port_of(headers)}{_with_query(raw, query)}", 307)
        if "/" not in raw[len(targets.PREFIX) :]:
            return RedirectResponse(f"{raw}/", status_code=307)
        token, is_cookie = access.token_of(headers)
        if host_task is None and is_cookie and token is not None:
            granted = f"{_GRANT}{self._services.grants.create(token, service.task_id)}"
            host = f"{service.task_id}.localhost{_port_of(headers)}"
            target = _with_query(raw, f"{query}&{granted}" if query else granted)
            return RedirectResponse(f"http://{host}{target}", 307)
        if not service.is_ready and is_page:
            return waiting_page(service.task_id)
        connection_of(scope).authenticate()
        await proxy_request(service, scope, receive, send)
        self._services.activity.touch(service.task_id)
        return None

    def _take_grant(self, raw: str, query: str, task_id: str) -> Response:
        query, _, code = query.rpartition(_GRANT)
        response = RedirectResponse(_with_query(raw, query.removesuffix("&")), 307)
        granted = self._services.grants.renew(code, task_id)
        if granted is not None:
            response.set_cookie(access.GRANT_COOKIE, granted, path="/", httponly=True, samesite="lax")
        return response

    async def _interactive(self, raw: str) -> Response:
        task_id = raw[len(INTERACTIVE) :].partition("/")[0]
        state = await self._services.read(service_state, task_id)
        if state == "ready":
            return RedirectResponse(f"{targets.PREFIX}{task_id}/", status_code=307)
        if state == "ended":
            return ended_page(task_id)
        return waiting_page(task_id)


def _port_of(headers: Headers) -> str:
    _, colon, port = headers["host"].removeprefix("[::1]").partition(":")
    return colon + port


def _with_query(raw: str, query: str) -> str:
    return f"{raw}?{query}" if query else raw


async def proxy_request(service: targets.Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Forward a request to a task's service, and the response to the client.

    Raises:
        RequestError: 503 if nothing listens on the port (yet); 502 if the listener belongs to another account, does not speak
            HTTP, or disconnects, possibly in the middle of a response.
    """
    reader, writer = await targets.connect(service)
    link = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
    # A service may respond before it has read the whole request, and a client may disconnect early.
    sending = asyncio.ensure_future(_send_request(link, writer, scope, receive))
    answering = asyncio.ensure_future(_pass_answer(link, reader, send))
    try:
        ended, _ = await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
        for one in ended:
            one.result()
    finally:
        sending.cancel()
        answering.cancel()
        await asyncio.gather(sending, answering, return_exceptions=True)
        writer.close()


async def _send_request(
    link: h11.Connection, writer: asyncio.StreamWriter, scope: Scope, receive: Receive
) -> None:
    """Send a client's request to the service; return when the client disconnects."""
    headers = [*targets.forwarded(scope["headers"]), (b"connection", b"close")]
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        # Request smuggling: the service may interpret two framings differently (RFC 9112, section 6.3).
        headers = [header for header in headers if header[0] != b"content-length"]
        headers.append((b"transfer-encoding", b"chunked"))
    target = scope["raw_path"].split(b"?", 1)[0]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    try:
        head = link.send(h11.Request(method=scope["method"], target=target, headers=headers))
    except h11.LocalProtocolError as error:
        raise RequestError(
            400, f"the request is not HTTP/1.1 ({error}); expected that. Encode its address."
        ) from error
    event: Message = {"more_body": True}
    with contextlib.suppress(OSError):  # the service has closed its end
        writer.write(head or b"")
        while event.get("more_body", False):
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            writer.write(link.send(h11.Data(data=event.get("body", b""))) or b"")
            await writer.drain()
        writer.write(link.send(h11.EndOfMessage()) or b"")
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_answer(link: h11.Connection, reader: asyncio.StreamReader, send: Send) -> None:
    is_whole = False
    try:
        while not is_whole:
            link.receive_data(await reader.read(_CHUNK_BYTES))
            await asyncio.sleep(0)  # yield: reading buffered bytes does not
            body = b""
            while not is_whole and (event := link.next_event()) is not h11.NEED_DATA:
                is_whole = isinstance(event, h11.EndOfMessage)
                if isinstance(event, h11.Response):
                    if event.status_code not in _STATUSES:
                        raise _broken(f"has status {event.status_code}")
                    start = {"status": event.status_code, "headers": targets.answered(event.headers)}
                    await send({"type": "http.response.start", **start})
                elif isinstance(event, h11.Data):
                    body += event.data
                elif event is h11.PAUSED:
                    raise _broken("to CONNECT opens a tunnel")
            if body or is_whole:
                await send({"type": "http.response.body", "body": body, "more_body": not is_whole})
    except OSError as error:
        raise _broken("is cut off") from error
    except h11.RemoteProtocolError as error:
        raise _broken("is not whole or no HTTP") from error


def _broken(what: str) -> RequestError:
    return RequestError(
        502,
        f"the answer of the task's service {what}; expected HTTP with a head of at most {_MAX_HEAD_BYTES} bytes and a status "
        "from 200 to 599. See the task's log.",
    )
