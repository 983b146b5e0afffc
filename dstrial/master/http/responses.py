"""Response bodies, error responses and streams of the API.

Clients print names, descriptions and messages verbatim, so control characters are escaped here. User data (configs, metrics,
metadata) is sent as stored (``orjson.Fragment``), as clients print it as JSON or YAML, which escape control characters.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import orjson
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dstrial.errors import DatabaseDamagedError, DstrialError, MasterError, RequestError
from dstrial.master import file_limit
from dstrial.master.store.database import OperationalError, SqlError
from dstrial.master.store.errors import ConflictError, InvalidError, NotFoundError, StoreError
from dstrial.visible_text import visible

logger = logging.getLogger(__name__)

Item: TypeAlias = "Mapping[str, Any] | Sequence[Mapping[str, Any]]"

_TOKEN_CHECK_S = 5.0  # period of checks whether the token of a stream is still valid

DEFAULT_LIMIT = 100  # default page size, as in Determined 0.38.1

# Pattern of control characters in JSON. It has false positives (an escaped backslash before b, user data) but no false
# negatives; most responses do not match and are serialised only once.
_SUSPECT = re.compile(rb"\\(?:u00[01]|b|f|r)|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xa8-\xae]|\xe2\x81[\xa6-\xa9]")


def message(bindings_class: type, **fields: Any) -> dict[str, Any]:
    """Return a message of Determined's API; optional fields not given are None.

    ``bindings_class`` is the message's class in Determined's client. Raises TypeError for unknown or missing fields.
    """
    required, optional = _names_of(bindings_class)
    unknown = fields.keys() - required - optional.keys()
    missing = required - fields.keys()
    if unknown or missing:
        raise TypeError(
            f"{bindings_class.__name__} is given {sorted(unknown)} and lacks {sorted(missing)}; expected its own fields. "
            "Name them as the generated class does."
        )
    return {**optional, **fields}


@functools.cache
def _names_of(bindings_class: type) -> tuple[frozenset[str], dict[str, None]]:
    parameters = list(inspect.signature(bindings_class).parameters.values())
    empty = inspect.Parameter.empty
    required = frozenset(parameter.name for parameter in parameters if parameter.default is empty)
    return required, {parameter.name: None for parameter in parameters if parameter.default is not empty}


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The rows that a request selects: from ``start`` to before ``end``, of ``total``."""

    offset: int
    limit: int
    start: int
    end: int
    total: int

    def to_json(self) -> dict[str, int]:
        return {
            "offset": self.offset,
            "limit": self.limit,
            "startIndex": self.start,
            "endIndex": self.end,
            "total": self.total,
        }


def page_of(total: int, offset: int | None, limit: int | None) -> Page:
    """Return which of ``total`` rows a request's offset and limit select.

    A negative offset counts from the end. Limit 0 or None means 100 rows, -1 all, -2 none (Determined 0.38.1, ``paginate.go``).
    Raises HTTP 400 for a limit below -2.
    """
    offset = offset or 0
    limit = limit or DEFAULT_LIMIT
    if limit < -2:
        raise RequestError(
            400, f"limit is {limit}; expected at least -2. Send -1 for all rows, or a positive number."
        )
    start = max(0, total + offset) if offset < 0 else min(offset, total)
    end = total if limit == -1 else start if limit == -2 else min(start + limit, total)
    return Page(offset, limit, start, end, total)


def to_json(answer: Any) -> bytes:
    """Serialise a response as JSON; escape control characters except in user data."""
    body = orjson.dumps(answer, option=orjson.OPT_NON_STR_KEYS)
    return orjson.dumps(_shown(answer), option=orjson.OPT_NON_STR_KEYS) if _SUSPECT.search(body) else body


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {key: _shown(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(inner) for inner in value]
    return value


_RETRY_AFTER_S = 1  # value of the Retry-After header

_SQL_ERROR = 1  # SQLITE_ERROR: the statement is wrong, so a retry cannot succeed

_STATUSES: dict[type[StoreError], int] = {NotFoundError: 404, ConflictError: 409, InvalidError: 400}

# HTTP status -> gRPC code and name, as in Determined's gateway.
_CODES = {
    400: (3, "InvalidArgument"),
    401: (16, "Unauthenticated"),
    403: (7, "PermissionDenied"),
    404: (5, "NotFound"),
    405: (12, "Unimplemented"),
    409: (6, "AlreadyExists"),
    413: (8, "ResourceExhausted"),
    429: (8, "ResourceExhausted"),
    500: (13, "Internal"),
    501: (12, "Unimplemented"),
    502: (14, "Unavailable"),
    503: (14, "Unavailable"),
}
_UNKNOWN = (2, "Unknown")


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """HTTP status and message of the response to a failed request."""

    status: int  # HTTP status
    text: str

    @property
    def code(self) -> int:
        """The gRPC status code, for example 5."""
        return _CODES.get(self.status, _UNKNOWN)[0]

    @property
    def reason(self) -> str:
        """The name of the gRPC status code, for example "NotFound"."""
        return _CODES.get(self.status, _UNKNOWN)[1]


def problem_of(error: BaseException) -> Problem:
    """Return the HTTP status and message with which to respond to an exception.

    The status is 503 for transient failures, after which trials retry, and 4xx for errors of the request. Other exceptions are
    bugs: the status is 500, and only the master's log has the cause.
    """
    if file_limit.is_shortage(error):
        return Problem(
            503, f"the master cannot open more files ({error}); expected a higher ulimit -n. Try again."
        )
    if isinstance(error, RequestError):
        return Problem(error.status, str(error))
    if isinstance(error, StoreError):
        return Problem(_STATUSES[type(error)], str(error))
    if isinstance(error, DatabaseDamagedError):
        return Problem(503, str(error))
    if isinstance(error, MasterError) or (isinstance(error, OperationalError) and _is_transient(error)):
        return Problem(
            503, f"the master cannot answer now ({error}); expected it to. Send the request again."
        )
    if isinstance(error, DstrialError):
        return Problem(400, str(error))
    if isinstance(error, OverflowError):
        return Problem(
            400,
            "a number in the request is larger than the master can store; expected 64 bits. Send a smaller one.",
        )
    return Problem(
        500, "the master has failed to answer this request; expected an answer. See why with `dstrial logs`."
    )


def _is_transient(error: OperationalError) -> bool:
    """Return whether a retry may succeed after an error of SQLite.

    Before Python 3.11 errors have no code, so this is always True.
    """
    return getattr(error, "sqlite_errorcode", None) != _SQL_ERROR


def error_response(problem: Problem) -> Response:
    """Return the response for a failed request, in the format of Determined's errors."""
    body = {"error": {"code": problem.code, "reason": problem.reason, "error": problem.text}}
    headers = {}
    if problem.status in (429, 503):
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    return Response(to_json(body), status_code=problem.status, media_type="application/json", headers=headers)


def ndjson(items: AsyncIterator[Item]) -> Stream:
    """Return a streamed response of lines ``{"result": …}``, one per message.

    Each of ``items`` is a message or a list of messages, which is sent as one chunk. An error of dstrial or SQLite ends the
    stream with a line ``{"error": …}``.
    """
    return Stream(_lines(items), media_type="application/json")


async def _lines(items: AsyncIterator[Item]) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            messages = [item] if isinstance(item, Mapping) else item
            if messages:
                yield b"".join(to_json({"result": one}) + b"\n" for one in messages)
    except (DstrialError, SqlError) as error:
        if not isinstance(error, (RequestError, StoreError)):
            logger.exception("a stream ends early")
        yield to_json(_error_line(error)) + b"\n"


def event_stream(items: AsyncIterator[Mapping[str, Any] | None]) -> Stream:
    """Return a streamed response of server-sent events, one per item.

    For None instead of an item, a comment is sent, which keeps the connection alive.
    """
    headers = {"content-type": "text/event-stream", "cache-control": "no-store"}
    return Stream(_events(items), headers=headers)


async def _events(items: AsyncIterator[Mapping[str, Any] | None]) -> AsyncIterator[bytes]:
    async for item in items:
        yield b": still here\n\n" if item is None else b"data: " + to_json(item) + b"\n\n"


class Stream(StreamingResponse):
    """A streamed response; ends early at a disconnect or when the token is revoked."""

    is_token_valid: Callable[[], Awaitable[bool]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(super().__call__(scope, receive, send))
        tasks = {sending}
        checking = None
        if self.is_token_valid is not None:
            checking = asyncio.ensure_future(_until_token_ends(self.is_token_valid))
            tasks.add(checking)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            has_token_ended = not sending.done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if has_token_ended:
            if checking is not None:
                checking.result()  # If the check failed, the stream must not end as if it were complete.
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            with contextlib.suppress(OSError):
                sending.result()


async def _until_token_ends(is_token_valid: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the request's token has become invalid, for example by a logout."""
    while await is_token_valid():
        await asyncio.sleep(_TOKEN_CHECK_S)


def _error_line(error: Exception) -> dict[str, Any]:
    problem = problem_of(error)
    return {
        "error": {
            "grpcCode": problem.code,
            "httpCode": problem.status,
            "message": problem.text,
            "httpStatus": problem.reason,
        }
    }
