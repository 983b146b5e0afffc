"""Streams one HTTP request to a service and its answer back, without buffering."""

from __future__ import annotations

import asyncio
import contextlib

import httptools
from starlette.types import Message, Receive, Scope, Send

from dstrial.errors import RequestError
from dstrial.master.http.peers import lift_body_deadline
from dstrial.master.proxy.targets import Service, answered, forwarded

_CHUNK_BYTES = 64 * 1024


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


async def relay(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
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
    answering = asyncio.ensure_future(_answer(reader, scope, send))
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
    head += [b"%b: %b" % header for header in forwarded(scope["headers"])]
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


async def _answer(reader: asyncio.StreamReader, scope: Scope, send: Send) -> None:
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
            start = {"status": parser.get_status_code(), "headers": answered(answer.headers)}
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
