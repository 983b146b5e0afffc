"""Streaming responses: newline-delimited JSON and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dstrial.errors import DstrialError, RequestError
from dstrial.master.http.errors import status_and_text
from dstrial.master.http.messages import to_json
from dstrial.master.store.database import SqlError
from dstrial.master.store.errors import StoreError

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 5.0

Item: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"


def ndjson(items: AsyncIterator[Item]) -> NdjsonResponse:
    """Return a stream of ``{"result": item}`` lines; a list is sent as one chunk.

    A ``DstrialError`` after the first line is sent as an error line of the protocol.
    """
    return NdjsonResponse(items)


class NdjsonResponse(Response):
    """Sends the lines of :func:`ndjson` until disconnect or revocation of the token."""

    media_type = "application/json"
    is_still_known: Callable[[], Awaitable[bool]] | None = None

    def __init__(self, items: AsyncIterator[Item]) -> None:
        self.status_code = 200
        self.background = None
        self._items = items
        self.init_headers()

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        self.raw_headers = [
            (b"content-type", b"application/json"),
            *((key.encode(), value.encode()) for key, value in (headers or {}).items()),
        ]

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        disconnected = asyncio.ensure_future(_until_gone(receive))
        tasks = {sending, disconnected}
        if self.is_still_known is not None:
            tasks.add(asyncio.ensure_future(_until_unknown(self.is_still_known)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_unknown = not sending.done() and not disconnected.done()
        finally:
            for task in tasks:
                if not task.done():
                    task.cancel()
            for task in tasks - {sending}:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending
        if is_unknown:
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for item in self._items:
                messages = [item] if isinstance(item, Mapping) else item
                body = b"".join(to_json({"result": one}) + b"\n" for one in messages)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except (DstrialError, SqlError) as error:
            if not isinstance(error, (RequestError, StoreError)):
                logger.exception("a stream ends early")
            await send(
                {
                    "type": "http.response.body",
                    "body": to_json(_error_line(error)) + b"\n",
                    "more_body": True,
                }
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventStream(NdjsonResponse):
    """Sends server-sent events: one JSON object per event; None sends a heartbeat."""

    media_type = "text/event-stream"

    def __init__(self, items: AsyncIterator[Mapping[str, Any] | None]) -> None:
        self.status_code = 200
        self.background = None
        self._events = items
        self.raw_headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for item in self._events:
            body = b": still here\n\n" if item is None else b"data: " + to_json(item) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_unknown(is_still_known: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the sender logs out, is deactivated, or its token is revoked."""
    while await is_still_known():
        await asyncio.sleep(_ASK_AGAIN_S)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_line(error: Exception) -> dict[str, Any]:
    problem = status_and_text(error)
    return {
        "error": {
            "grpcCode": problem.code,
            "httpCode": problem.status,
            "message": problem.text,
            "httpStatus": problem.reason,
        }
    }
