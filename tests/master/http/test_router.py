"""Request fields, messages, paging, routing and streams of the HTTP API; its server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.metadata
import re
import socket
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import uvicorn
from determined.common.api import bindings
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version
from serving import Master

from dstrial.errors import ConfigError, ConfigProblem, MasterError, RequestError
from dstrial.master.http.connection import Connection
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message, ndjson, page_of, problem_of
from dstrial.master.http.router import PUBLIC, Api, ApiRequest, Route, route

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

process = pytest.mark.process


def test_uvicorn_upper_bound_follows_installed_release() -> None:
    """``http/connection.py`` uses undocumented names, so no untested release is admitted."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    requirement = next(one for one in map(Requirement, project["dependencies"]) if one.name == "uvicorn")
    installed = Version(importlib.metadata.version("uvicorn"))

    assert installed in requirement.specifier
    assert f"{installed.major}.{installed.minor + 1}" not in requirement.specifier


def test_fields_accept_camel_and_snake_case() -> None:
    body = Fields({"is_raw": True, "stepsCompleted": "12", "uuid": "a", "trialId": 1, "trial_id": 2})
    assert body.flag("isRaw") is True
    assert body.integer("stepsCompleted") == 12
    assert body.required_text("uuid") == "a"
    assert body.integer("trialId") == 1
    # Keys of nested objects are those of the user.
    assert Fields({"hparams": {"learning_rate": 1}}).mapping("hparams") == {"learning_rate": 1}


@pytest.mark.parametrize(
    ("read", "value", "text"),
    [
        *(("text", 1, ""), ("integer", "1.5", ""), ("integer", True, ""), ("integer", 2**63, "")),
        *(("number", "1", ""), ("flag", "true", ""), ("items_of", {}, ""), ("mapping", [], "")),
        *(("field_list", [1], r"x\[0\] is"), ("texts", [1], r"x\[0\] is")),
        ("texts", ["a", 1], r"x\[1\] is 1; expected a string\."),
        ("ids", [1, 2, True], r"x\[2\] is True; expected a whole number of 32 bits\."),
        ("field_list", [{}, "a"], r"x\[1\] is 'a'; expected an object\."),
        ("text", {"regex": 1}, r"x is \{'regex': 1\}; expected a string\."),
        ("mapping", [0] * 10**6, r"x is \[0, 0, 0, 0, 0, 0, \.\.\.\]; expected an object\."),
    ],
)
def test_fields_wrong_type_is_refused_with_path(read: str, value: Any, text: str) -> None:
    with pytest.raises(RequestError, match=r"the request's body\.x.* is .*; expected ") as refusal:
        getattr(Fields({"x": value}), read)("x")
    assert refusal.value.status == 400
    assert re.search(text, str(refusal.value))


def test_fields_error_names_nested_path() -> None:
    with pytest.raises(RequestError, match=r"body\.updates\[1\]\.jobId is missing"):
        (Fields({"updates": [{}, {}]}).field_list("updates") or [])[1].required_text("jobId")


@pytest.mark.parametrize("fields", [{"username": "a"}, {"username": "a", "admin": 1, "active": 1, "x": 1}])
def test_message_unreadable_by_client_raises_type_error(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="v1User"):
        message(bindings.v1User, **fields)


@given(total=st.integers(0, 500), offset=st.integers(-600, 600), limit=st.integers(-2, 600))
def test_page_of_stays_within_list(total: int, offset: int, limit: int) -> None:
    page = page_of(total, offset, limit)
    assert 0 <= page.start <= page.end <= total
    if limit == -2:
        assert page.start == page.end
    elif limit != -1:
        assert page.end - page.start <= (limit or 100)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError(409, "x"), 409),
        (ConfigError([ConfigProblem("a", "b", "c", "d.")]), 400),
        (MasterError("closed"), 503),
        (sqlite3.OperationalError("database is locked"), 503),
        (OverflowError("Python int too large"), 400),
        (KeyError("x"), 500),
    ],
)
def test_problem_of_maps_exceptions_to_status(error: Exception, status: int) -> None:
    assert problem_of(error).status == status


def test_internal_error_text_hides_details() -> None:
    assert "secret" not in problem_of(ValueError("secret")).text


def test_duplicate_routes_are_refused() -> None:
    twice = [route("GET", "/x/{a}", _nothing, access=PUBLIC), route("GET", "/x/{b}", _nothing, access=PUBLIC)]
    with pytest.raises(ValueError, match="two handlers"):
        Api(SimpleNamespace(), twice)  # type: ignore[arg-type]  # no route needs services


def _routed(api: Api, method: str, path: str) -> str:
    """Return the path of the route that a request is sent to."""
    return api._find({"method": method, "path": path})[0].path


def test_literal_segment_wins_over_path_parameter() -> None:
    routes = [
        route("GET", "//experiments/{id}", _nothing, access=PUBLIC),
        route("PATCH", "//experiments/{id}", _nothing, access=PUBLIC),
        route("POST", "//experiments/continue", _nothing, access=PUBLIC),
    ]
    api = Api(SimpleNamespace(), routes)  # type: ignore[arg-type]  # no route needs services
    assert _routed(api, "POST", "/experiments/continue") == "/experiments/continue"
    assert _routed(api, "PATCH", "/experiments/1") == "/experiments/{id}"
    with pytest.raises(RequestError, match=r"is GET; expected POST\.") as refusal:
        _routed(api, "GET", "/experiments/continue")
    assert refusal.value.status == 405
    with pytest.raises(RequestError, match=r"expected GET or PATCH\."):
        _routed(api, "DELETE", "/experiments/1")


async def _nothing(_request: ApiRequest) -> dict[str, Any]:
    return {}


@pytest.mark.process
def test_every_client_request_is_routed_or_refused(served: Master) -> None:
    text = Path(bindings.__file__).read_text()
    templates = set(re.findall(r'method="([A-Z]+)",\s*path=f?"([^"]+)"', text))
    assert len(templates) > 250
    api = _app_of(served)
    for method, template in templates:
        refusal = _refusal_of(api, method, re.sub(r"\{\w+\}", "1", template))
        if refusal is not None:
            assert refusal.status == 501, f"{method} {template}: {refusal}"


def _refusal_of(api: Api, method: str, path: str) -> RequestError | None:
    try:
        api._find({"method": method, "path": path, "raw_path": path.encode()})
    except RequestError as refusal:
        return refusal
    return None


def _app_of(master: Master) -> Api:
    from dstrial.master.server import all_routes

    return Api(master.services, all_routes())


@process
def test_body_is_read_for_any_content_type(fresh_master: Master) -> None:
    for content_type in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}):
        body = {"is_hashed": False, "username": "other", "password": "Other-password-1"}
        answer = fresh_master.send("POST", "/api/v1/auth/login", body, headers=content_type)
        assert answer.status == 200, answer.content


@process
@pytest.mark.parametrize(
    "body",
    [b"{", b"[1]", b'"a"', b"nope", b'{"a": NaN}', b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 5000],
    ids=["brace", "list", "text", "word", "NaN", "no UTF-8", "half a character", "5000 brackets"],
)
def test_body_not_json_object_is_400(served: Master, body: bytes) -> None:
    answer = served.send("POST", "/api/v1/auth/login", body)
    assert answer.status == 400
    assert answer.json["error"]["reason"] == "InvalidArgument"


@process
def test_body_nested_too_deeply_is_400(served: Master) -> None:
    answer = served.send("POST", "/api/v1/auth/login", b'{"a":' + b"[" * 300 + b"]" * 300 + b"}")
    assert answer.status == 400
    assert "levels deep" in answer.error


@process
def test_error_response_has_client_format(served: Master) -> None:
    answer = served.get("/api/v1/users/4711")
    assert answer.status == 404
    assert answer.json == {"error": {"code": 5, "reason": "NotFound", "error": answer.error}}


@process
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/v1/no-such-thing", 501),
        ("GET", "/api/v1//users", 501),
        ("GET", "/../etc/passwd", 404),
        ("DELETE", "/api/v1/me", 501),
        ("GET", "/api/v1/users/one", 400),
        ("GET", "/api/v1/users/99999999999", 400),
        ("POST", "/api/v1/notebooks", 501),
        ("DELETE", "/api/v1/workspaces/1/namespace-bindings", 501),
        ("GET", "/proxy/a:1/x", 404),
    ],
)
def test_unserved_paths_return_error_status(served: Master, method: str, path: str, status: int) -> None:
    assert served.send(method, path, token="admin").status == status


@process
def test_declared_oversized_body_is_refused_before_upload(served: Master) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/api/v1/auth/login")
        connection.putheader("Content-Length", str(10**9))
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413
        assert orjson.loads(answer.read())["error"]["reason"] == "ResourceExhausted"


@process
def test_chunked_oversized_body_is_refused_during_upload(served: Master) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(
            b"POST /api/v1/auth/login HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                connection.sendall(chunk)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@contextlib.contextmanager
def _running(routes: list[Route]) -> Iterator[int]:
    """Serve routes that need no services; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = Api(SimpleNamespace(), routes)  # type: ignore[arg-type]
    server = uvicorn.Server(
        uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=lambda: server.run([listener]), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()


@process
def test_ndjson_stream_ends_with_its_error() -> None:
    async def items() -> AsyncIterator[Any]:
        yield {"a": 1}
        yield [{"a": 2}, {"a": 3}]
        yield []
        raise RequestError(404, "gone")

    async def handler(_request: ApiRequest) -> Any:
        return ndjson(items())

    with _running([route("GET", "//s", handler, access=PUBLIC)]) as port:
        lines = _get(port, "/s")[1].split(b"\n")
    assert [orjson.loads(line) for line in lines[:3]] == [{"result": {"a": number}} for number in (1, 2, 3)]
    assert orjson.loads(lines[3])["error"]["message"] == "gone"
    assert bindings.runtimeStreamError.from_json(orjson.loads(lines[3])["error"]).httpCode == 404
    assert lines[4:] == [b""]


@process
def test_stream_ends_when_client_disconnects() -> None:
    ended = threading.Event()

    async def items() -> AsyncIterator[Any]:
        try:
            yield {"a": 1}
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def handler(_request: ApiRequest) -> Any:
        return ndjson(items())

    with _running([route("GET", "//s", handler, access=PUBLIC)]) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(b"GET /s HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100)
        assert ended.wait(20)


@process
def test_handler_exception_is_logged_but_not_returned(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(_request: ApiRequest) -> Any:
        raise KeyError("the secret")

    with _running([route("GET", "//s", handler, access=PUBLIC)]) as port:
        status, text = _get(port, "/s")
    assert status == 500
    assert b"secret" not in text
    assert b"Traceback" not in text
    assert "the secret" in caplog.text


@process
def test_encoded_slashes_stay_in_path_segment() -> None:
    async def handler(request: ApiRequest) -> Any:
        return request.path_params

    with _running([route("GET", "//s/{name}/x", handler, access=PUBLIC)]) as port:
        assert orjson.loads(_get(port, "/s/a%2Fb%20%C3%A4/x?y=1")[1]) == {"name": "a/b ä"}
