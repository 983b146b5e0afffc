"""Routes requests to handlers, with access checks, limits and error responses.

Ids in paths are checked here. A handler checks ids in a body with ``ApiRequest.require_trial`` and similar methods.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote

import orjson
from determined.common.api import bindings
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dstrial.errors import RequestError
from dstrial.master.clock import parse_time
from dstrial.master.http import access as guard
from dstrial.master.http.connection import connection_of
from dstrial.master.http.fields import Fields, camel, shown
from dstrial.master.http.responses import (
    Page,
    Stream,
    error_response,
    page_of,
    problem_of,
    to_json,
)
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.tokens import AllocationIdentity, Identity, User

if TYPE_CHECKING:
    from dstrial.master.services import Services

logger = logging.getLogger(__name__)

API_PREFIX = "/api/v1"

MAX_BODY_BYTES = 16 * 2**20  # default limit of a request body; a route may allow more

_MAX_DEPTH = 100  # maximum nesting of a body; orjson cannot serialise more than 254 levels

_MAX_VALUES = 500_000  # maximum number of values in a body; a batch of metrics or logs has some thousands

_MAX_ID = 2**31 - 1  # ids in paths and queries have 32 bits

_PARAMETER = re.compile(r"\{[^}]*\}")


class Access(enum.Enum):
    """Which token a request to a route needs."""

    PUBLIC = enum.auto()  # nothing
    USER = enum.auto()  # a user's token, not an allocation's
    ADMIN = enum.auto()  # an administrator's token
    TRIAL = enum.auto()
    """A user's token; or an allocation's token for its own trial, task, allocation and experiment (read-only), and for
    checkpoints of its experiment or the one it started from. Names of path parameters (``trial_id``) say which id is meant."""

    OWNER = enum.auto()  # no token, but a connection to the UNIX socket in the state directory


PUBLIC, USER, ADMIN, TRIAL, OWNER = Access.PUBLIC, Access.USER, Access.ADMIN, Access.TRIAL, Access.OWNER
T = TypeVar("T")

Answer: TypeAlias = "Mapping[str, Any] | Response"
Handler: TypeAlias = "Callable[[ApiRequest], Awaitable[Answer]]"


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """An endpoint: method, path, handler, and which token a request needs.

    Path parameters are in braces; ``{trial_id:int}`` accepts 32-bit integers. ``unauthenticated`` is the handler of requests
    without a valid token, for example one that shows a login page. If it is None, such requests get HTTP 401.
    """

    method: str
    path: str
    handler: Handler
    access: Access
    max_body_bytes: int = MAX_BODY_BYTES
    unauthenticated: Handler | None = None


def route(
    method: str,
    path: str,
    handler: Handler,
    *,
    access: Access,
    max_body_bytes: int = MAX_BODY_BYTES,
    unauthenticated: Handler | None = None,
) -> Route:
    """Return a route; ``path`` is below ``/api/v1``, but ``//info`` means ``/info``."""
    absolute = path[1:] if path.startswith("//") else API_PREFIX + path
    return Route(method, absolute, handler, access, max_body_bytes, unauthenticated)


def reads(handle: Callable[[Connection, ApiRequest], Answer]) -> Handler:
    """Make a handler from a function that reads the database.

    The function runs in a reader thread, with a connection that shows one snapshot of the database.
    """

    @functools.wraps(handle)
    async def run(request: ApiRequest) -> Answer:
        return await request.services.read(handle, request)

    return run


def writes(handle: Callable[[Transaction, ApiRequest], Answer | None]) -> Handler:
    """Make a handler from a function that changes the database in one transaction.

    If the function returns None, the response is ``{}``.
    """

    @functools.wraps(handle)
    async def run(request: ApiRequest) -> Answer:
        answer = await request.services.write(lambda tx: handle(tx, request))
        return {} if answer is None else answer

    return run


@dataclasses.dataclass(slots=True)
class ApiRequest:
    """A request as passed to a handler, with its parsed parameters and body."""

    services: Services
    route: Route
    scope: Scope
    headers: Headers
    path_params: dict[str, Any] = dataclasses.field(default_factory=dict)
    identity: Identity | None = None
    content: bytes = b""
    _query: dict[str, list[str]] | None = None

    @property
    def user(self) -> User:
        if self.identity is None:
            raise RequestError(401, guard.UNAUTHENTICATED)
        return self.identity.user

    @property
    def allocation(self) -> AllocationIdentity | None:
        return None if self.identity is None else self.identity.allocation

    def body(self) -> Fields:
        """Parse the body as a JSON object, else raise HTTP 400; an empty body is ``{}``."""
        value = self.json()
        if not isinstance(value, dict):
            raise RequestError(
                400,
                f"the request's body is {shown(value)}; expected a JSON object. Send it as the protocol has it.",
            )
        return Fields(value)

    def json(self) -> Any:
        if not self.content.strip():
            return {}
        _check_num_values(self.content)
        try:
            value = orjson.loads(self.content)
        except orjson.JSONDecodeError as error:
            raise RequestError(
                400, f"the request's body is not JSON ({error}); expected a JSON object. Send valid JSON."
            ) from error
        if self.content.count(b"{") + self.content.count(b"[") > _MAX_DEPTH and _is_deep(value):
            raise RequestError(
                400,
                f"the request's body is nested more than {_MAX_DEPTH} levels deep; expected less. Send a flatter one.",
            )
        return value

    def queries(self, name: str) -> list[str]:
        """Return all values of a query parameter, in order; [] if it is absent.

        ``name`` is in camelCase; the client may also write the parameter in snake_case.
        """
        if self._query is None:
            self._query = {}
            text = self.scope.get("query_string", b"").decode("latin-1")
            for key, value in parse_qsl(text, keep_blank_values=True):
                self._query.setdefault(camel(key), []).append(value)
        return self._query.get(name, [])

    def query(self, name: str) -> str | None:
        values = self.queries(name)
        return values[-1] if values else None

    def query_int(self, name: str) -> int | None:
        text = self.query(name)
        if not text:
            return None
        number = _parse_int32(text)
        if number is None:
            raise self.wrong_query(name, "a whole number of 32 bits")
        return number

    def query_ints(self, name: str) -> list[int]:
        numbers = [_parse_int32(text) for text in self.queries(name)]
        if None in numbers:
            raise self.wrong_query(name, "whole numbers of 32 bits")
        return [number for number in numbers if number is not None]

    def query_time_us(self, name: str) -> int | None:
        """Return a query parameter's time in microseconds since the epoch.

        None if the parameter is absent or empty. Raises HTTP 400 if it is not an ISO time.
        """
        text = self.query(name)
        try:
            return parse_time(text) if text else None
        except (ValueError, OverflowError) as error:
            raise self.wrong_query(name, "a time such as 2026-01-31T00:00:00Z") from error

    def query_flag(self, name: str) -> bool | None:
        text = self.query(name)
        if text is None or text == "":
            return None
        value = {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
        if value is None:
            raise self.wrong_query(name, "true or false")
        return value

    def query_choices(self, name: str, choices: type[enum.Enum]) -> list[str]:
        """Return a query parameter's values; raise HTTP 400 for one not in ``choices``."""
        allowed = [str(member.value) for member in choices]
        values = self.queries(name)
        if any(value not in allowed for value in values):
            raise self.wrong_query(name, "one of " + ", ".join(allowed))
        return values

    def query_choice(self, name: str, choices: type[enum.Enum]) -> str | None:
        values = self.query_choices(name, choices)
        return values[-1] if values else None

    @property
    def is_descending(self) -> bool:
        return self.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"

    def ordered(
        self, rows: Iterable[T], keys: Mapping[str, Callable[[T], Any]], choices: type[enum.Enum]
    ) -> list[T]:
        """Return rows sorted as the query parameters ``sortBy`` and ``orderBy`` say.

        ``keys`` maps a value of ``sortBy`` to a sort key function; the function at "" is the default. ``choices`` are the
        values that ``sortBy`` may have.
        """
        sort_by = self.query_choice("sortBy", choices) or ""
        return sorted(rows, key=keys.get(sort_by, keys[""]), reverse=self.is_descending)

    def page_of(self, total: int) -> Page:
        """Return which of ``total`` rows the query's ``offset`` and ``limit`` select."""
        return page_of(total, self.query_int("offset"), self.query_int("limit"))

    def page(self, rows: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """Return (rows that the query's offset and limit select, ``v1Pagination``)."""
        page = self.page_of(len(rows))
        return rows[page.start : page.end], page.to_json()

    def wrong_query(self, name: str, expected: str) -> RequestError:
        return RequestError(
            400,
            f"query parameter {name} is {shown(self.query(name))}; expected {expected}. Send it as the protocol has it.",
        )

    def require_trial(self, trial_id: int) -> None:
        """Raise HTTP 403 if the request's token belongs to an allocation of another trial."""
        self._require("trial", trial_id, "trial_id")

    def require_experiment(self, experiment_id: int) -> None:
        """Raise HTTP 403 if an allocation's token may not be used for an experiment.

        An allocation may only read the experiment to which it belongs.
        """
        self._require("experiment", experiment_id, "experiment_id")
        if self.allocation is not None and self.route.method != "GET":
            raise RequestError(403, "an allocation's token may only read its experiment; use a user's token")

    def require_task(self, task_id: str) -> None:
        self._require("task", task_id, "task_id")

    def require_allocation(self, allocation_id: str) -> None:
        self._require("allocation", allocation_id, "id")

    async def require_checkpoint(self, checkpoint_uuid: str, *, is_change: bool = False) -> None:
        """Raise HTTP 403 if an allocation's token may not read or change a checkpoint.

        An allocation may read and change its experiment's checkpoints, and read the checkpoint that it started from.
        """
        if self.allocation is not None and not await self.services.read(
            guard.may_use_checkpoint, self.allocation, checkpoint_uuid, is_change=is_change
        ):
            raise _forbidden("checkpoint", checkpoint_uuid)

    def _require(self, noun: str, asked: int | str, field: str) -> None:
        if self.allocation is not None and asked != getattr(self.allocation, field):
            raise _forbidden(noun, asked)

    async def _require_own_path(self) -> None:
        checks: dict[str, Callable[[Any], None]] = {
            "trial_id": self.require_trial,
            "run_id": self.require_trial,
            "experiment_id": self.require_experiment,
            "task_id": self.require_task,
            "allocation_id": self.require_allocation,
        }
        for name, value in self.path_params.items():
            if name in checks:
                checks[name](value)
            elif name == "checkpoint_uuid":
                await self.require_checkpoint(value)


def _forbidden(noun: str, asked: int | str) -> RequestError:
    return RequestError(
        403,
        f"{noun} {asked} is not that of this token's allocation; expected its own. Use a user's token for others.",
    )


def _check_num_values(content: bytes) -> None:
    """Raise HTTP 400 if a body has too many JSON values.

    Parsed, 16 MiB of small values may need 1 GiB of memory.
    """
    if _num_separators(content) <= _MAX_VALUES:
        return
    # The commas may be inside strings, as in a batch of logs. Remove escaped backslashes and quotes first, so that the remaining
    # quotes delimit strings.
    parts = content.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"', 2 * _MAX_VALUES + 1)
    if len(parts) > 2 * _MAX_VALUES or sum(_num_separators(part) for part in parts[::2]) > _MAX_VALUES:
        raise RequestError(
            400,
            f"the request's body holds more than {_MAX_VALUES} values; expected at most that. Send less at a time.",
        )


def _num_separators(content: bytes) -> int:
    return content.count(b",") + content.count(b"[") + content.count(b"{")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


class Api:
    """The ASGI application: matches the route, checks access, calls the handler."""

    def __init__(self, services: Services, routes: Sequence[Route]) -> None:
        self.routes = tuple(routes)
        self._services = services
        # Number of path segments -> routes, sorted so that fixed segments match before parameters.
        self._by_length: dict[int, list[tuple[list[str], Route]]] = collections.defaultdict(list)
        known: set[tuple[str, str]] = set()
        for one in routes:
            words = one.path.split("/")[1:]
            key = (one.method, _PARAMETER.sub("{}", one.path))
            if key in known:
                raise ValueError(f"{one.method} {one.path} has two handlers; expected one. Remove one route.")
            known.add(key)
            self._by_length[len(words)].append((words, one))
        for found in self._by_length.values():
            found.sort(key=lambda pair: [word.startswith("{") for word in pair[0]])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Request boundary: every exception is logged; the client sees the cause only of its own errors.
        try:
            response = await self._answer(scope, receive)
        except _DisconnectedError:
            return
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= 500 and problem.status != 501:
                # Only for bugs does the response omit the cause.
                words = (scope["method"], scope["path"], problem.status, problem.text)
                logger.error("%s %s is answered %d: %s", *words, exc_info=problem.status == 500)
            response = error_response(problem)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        headers = Headers(scope=scope)
        guard.check_host_and_origin(headers)
        found, values = self._find(scope)
        request = ApiRequest(self._services, found, scope, headers)
        if found.access is Access.OWNER:
            if not connection_of(scope).is_at_owner_socket:
                raise RequestError(
                    403,
                    f"{found.path} is for the owner of the state directory only; expected to be asked at its socket. Use "
                    "`dstrial login`.",
                )
        elif found.access is not Access.PUBLIC:
            try:
                request.identity = await guard.identify(self._services, headers, found.method)
            except RequestError as error:
                if error.status == 401 and found.unauthenticated is not None:
                    return _response(await found.unauthenticated(request))
                raise
            connection_of(scope).authenticate()
        request.path_params = {
            name: _number(name, value) if kind == "int" else value for name, kind, value in values
        }
        await _check_access(request)
        if found.method != "GET":
            request.content = await _read_body(headers, receive, found.max_body_bytes)
        response = _response(await found.handler(request))
        if isinstance(response, Stream) and found.access not in (Access.OWNER, Access.PUBLIC):
            response.is_token_valid = functools.partial(
                guard.is_authenticated, self._services, headers, found.method
            )
        return response

    def _find(self, scope: Scope) -> tuple[Route, list[tuple[str, str, str]]]:
        """Return a request's route, and for each path parameter (name, kind, value).

        The kind is "int" or "". Raises HTTP 404, 405 or 501 if no route matches.
        """
        # The raw path keeps an encoded slash within its segment.
        raw = scope.get("raw_path") or scope["path"].encode()
        path = raw.split(b"?", 1)[0].decode("latin-1")
        segments = path.split("/")[1:]
        methods = []
        parameters: list[bool] | None = None  # which segments of the first match are parameters
        for words, found in self._by_length.get(len(segments), ()):
            if all(
                word == segment or (segment and word.startswith("{"))
                for word, segment in zip(words, segments, strict=True)
            ):
                are_parameters = [word.startswith("{") for word in words]
                parameters = parameters or are_parameters
                if are_parameters != parameters:
                    break
                methods.append(found.method)
                if found.method == scope["method"]:
                    return found, [
                        (name, kind, unquote(segment))
                        for word, segment in zip(words, segments, strict=True)
                        if word.startswith("{")
                        for name, _, kind in [word.strip("{}").partition(":")]
                    ]
        raise _no_route_error(scope["method"], path, sorted(set(methods)))


async def _check_access(request: ApiRequest) -> None:
    access = request.route.access
    if request.allocation is not None:
        if access is not Access.TRIAL:
            raise RequestError(
                403,
                f"{request.route.method} {request.route.path} is not open to an allocation's token; expected a user's. "
                "Use DET_USER_TOKEN inside a trial.",
            )
        await request._require_own_path()
    elif access is Access.ADMIN and not request.user.admin:
        raise RequestError(
            403,
            f"user {request.user.username!r} is no administrator; expected one. Ask with `det -u admin`, "
            "or as another administrator.",
        )


_ALTERNATIVES = {
    "notebooks": "Run `jupyter lab` on this machine; the SDK and detached runs work from any notebook",
    "shells": "Use a shell of this machine, where trials are plain processes; `det command run` runs one with slots and a log",
}
"""First path segment of a part of Determined's API that is not served -> what to use instead."""


def _no_route_error(method: str, path: str, methods: list[str]) -> RequestError:
    if path.startswith(f"{API_PREFIX}/"):
        instead = _ALTERNATIVES.get(path.split("/")[3], "Use a Determined cluster for it")
        text = f"{method} {path[:120]} is not offered by the embedded master. {instead}; the README lists what is offered."
        return RequestError(501, text)
    if methods:
        return RequestError(
            405, f"the method of {path} is {method}; expected {' or '.join(methods)}. Send one of these."
        )
    return RequestError(
        404, f"{method} {path[:120]} does not exist; expected a request of Determined 0.38.1. Check the path."
    )


def _parse_int32(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,10}", text) and abs(int(text)) <= _MAX_ID else None


def _number(name: str, text: str) -> int:
    number = _parse_int32(text)
    if number is None:
        raise RequestError(
            400,
            f"{name} is {shown(text)}; expected a whole number of 32 bits. Give the number that a list shows.",
        )
    return number


def _response(answer: Answer) -> Response:
    if isinstance(answer, Response):
        return answer
    return Response(to_json(answer), media_type="application/json")


class _DisconnectedError(Exception):
    pass


async def _read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    is_more = True
    while is_more:
        event: Message = await receive()
        if event["type"] == "http.disconnect":
            raise _DisconnectedError
        chunk = event.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        is_more = event.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        413, f"the request's body is larger than {limit} bytes; expected at most that. Send less at a time."
    )
