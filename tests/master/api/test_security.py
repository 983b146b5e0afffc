"""Access to routes by token, host, origin and cookie."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from serving import Master

from dstrial.master.http.router import ADMIN, OWNER, PUBLIC, TRIAL, USER, Route
from dstrial.master.server import all_routes
from dstrial.master.store import tokens

pytestmark = pytest.mark.process

_OWN = {
    "trial_id": "1",
    "run_id": "1",
    "experiment_id": "1",
    "task_id": "1.request",
    "allocation_id": "1.request.1",
}
_SCOPED = re.compile(r"\{(trial_id|run_id|experiment_id|task_id|allocation_id|checkpoint_uuid)[:}]")

# Route -> body or query of a trial's own request, for routes of trials without an ID in the path.
_OWN_BODIES: dict[str, Any] = {
    "POST /api/v1/runs/start": {
        "runId": 1,
        "checkpointStorage": {"type": "directory", "container_path": "/x"},
    },
    "POST /api/v1/checkpoints": {
        "uuid": "b3b4a7b8-0000-4000-8000-000000000001",
        "taskId": "1.request",
        "allocationId": "1.request.1",
        "reportTime": "2026-01-01T00:00:00Z",
        "resources": {"a": "1"},
        "metadata": {"steps_completed": 1},
        "state": "STATE_COMPLETED",
        "training": {},
    },
    "PATCH /api/v1/checkpoints": {"checkpoints": [{"uuid": "OWN", "resources": {"resources": {}}}]},
    "DELETE /api/v1/checkpoints": {"checkpointUuids": ["OWN"]},
    "POST /api/v1/checkpoints/rm": {"checkpointUuids": ["OWN"], "checkpointGlobs": ["none"]},
    "POST /task-logs": [{"task_id": "1.request", "log": "x\n"}],
    "GET /api/v1/trials/metrics/trial_metrics": "?trialIds=1&group=training",
    "GET /api/v1/trials/metrics/training_metrics": "?trialIds=1",
    "GET /api/v1/trials/metrics/validation_metrics": "?trialIds=1",
    "POST /api/v1/webhooks/custom": {"experimentId": 1, "trialId": 1, "data": {"title": "t"}},
    "POST /api/v1/trial-source-info": {"trialSourceInfo": {"trialId": 1, "checkpointUuid": "OWN"}},
}


def _name(route: Route) -> str:
    return f"{route.method} {route.path}"


def _path(route: Route, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)(:int)?\}", lambda match: values.get(match[1], "1"), route.path)


def _ask(master: Master, route: Route, token: str | None, values: dict[str, str]) -> int:
    path, body = _path(route, values), None
    own = _OWN_BODIES.get(_name(route))
    if isinstance(own, str):
        path += own
    elif own is not None:
        body = _filled(own, values.get("checkpoint_uuid", "none"))
    if "preemption" in path or "logs" in path:
        path += "?timeoutSeconds=0&follow=false" if "?" not in path else ""
    return master.send(route.method, path, body, token=token).status


def _filled(value: Any, checkpoint: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, checkpoint) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, checkpoint) for one in value]
    return checkpoint if value == "OWN" else value


def _routes(*accesses: Any) -> list[Route]:
    return [route for route in all_routes() if route.access in accesses]


def test_public_routes_are_known_requests_and_page_assets() -> None:
    names = {_name(route) for route in _routes(PUBLIC)}
    assert {name for name in names if not name.startswith("GET /page/assets/")} == {
        "GET /info",
        "GET /health",
        "GET /api/v1/master",
        "POST /api/v1/auth/login",
        "GET /login",  # a page without data; its script redeems the code of a login link
        "POST /api/v1/auth/link",
    }


def test_owner_routes_reject_every_token_over_tcp(served: Master) -> None:
    """Owner routes accept only the UNIX socket in the state directory."""
    assert {_name(route) for route in _routes(OWNER)} == {
        "POST /owner/login",
        "POST /owner/link",
        "GET /owner/webhook-key",
    }
    for route in _routes(OWNER):
        for token in (None, "determined", "admin", "trial-1", "trial-1-user"):
            assert _ask(served, route, token, _OWN) == 403, token


def test_non_public_routes_require_valid_token(served: Master) -> None:
    values = {**_OWN, "checkpoint_uuid": served.checkpoints[1]}
    for route in _routes(USER, ADMIN, TRIAL):
        for token in (None, "garbage", "", "x" * 5000):
            assert _ask(served, route, token, values) == 401, (_name(route), token)


def test_authentication_precedes_path_parameter_validation(served: Master) -> None:
    assert served.get("/api/v1/users/one", None).status == 401


def test_trial_token_cannot_use_user_or_admin_routes(served: Master) -> None:
    for route in _routes(USER, ADMIN):
        assert _ask(served, route, "trial-1", _OWN) == 403, _name(route)


def test_trial_token_can_use_own_routes(fresh_master: Master) -> None:
    values = {**_OWN, "checkpoint_uuid": fresh_master.checkpoints[1]}
    for route in _routes(TRIAL):
        if "{experiment_id" in route.path and route.method != "GET":
            assert _ask(fresh_master, route, "trial-1", values) == 403, _name(route)
        elif route.method == "GET":
            assert _ask(fresh_master, route, "trial-1", values) not in (401, 403, 500), _name(route)


def test_trial_routes_reject_token_of_another_trial(served: Master) -> None:
    values = {**_OWN, "checkpoint_uuid": served.checkpoints[1]}
    for route in _routes(TRIAL):
        if not _SCOPED.search(route.path):
            assert _name(route) in _OWN_BODIES, (
                f"{_name(route)} names nothing in its path: say what it is sent"
            )
        assert _ask(served, route, "trial-2", values) == 403, _name(route)


def test_admin_routes_reject_other_users(served: Master) -> None:
    assert _routes(ADMIN)
    for route in _routes(ADMIN):
        for token in ("determined", "other", "trial-1-user"):
            assert _ask(served, route, token, _OWN) == 403, _name(route)


def test_all_users_can_use_remaining_routes(fresh_master: Master) -> None:
    nothing = dict.fromkeys([*_OWN, "project_id", "workspace_id"], "999999")
    nothing["checkpoint_uuid"] = "00000000-0000-4000-8000-000000000000"
    for token in ("other", "admin", "trial-1-user"):
        for route in _routes(USER, TRIAL):
            if _name(route) == "POST /api/v1/auth/logout" or "{user_id" in route.path:
                continue
            if route.path == "/page/events":
                continue  # an endless stream
            assert _ask(fresh_master, route, token, nothing) not in (401, 403, 500), (_name(route), token)


def test_trial_can_read_start_checkpoint(fresh_master: Master) -> None:
    warm = fresh_master.checkpoints[2]
    fresh_master.change("UPDATE allocations SET checkpoint_uuid = ? WHERE trial_id = 1", warm)
    for route in _routes(TRIAL):
        if "{checkpoint_uuid" in route.path and route.method == "GET":
            values = {**_OWN, "checkpoint_uuid": warm}
            assert _ask(fresh_master, route, "trial-1", values) not in (401, 403, 500), _name(route)


def test_allocation_tokens_end_with_allocation(fresh_master: Master) -> None:
    def status(token: str) -> int:
        return fresh_master.get("/api/v1/tasks/1.request", token).status

    assert status("trial-1") == 200
    assert status("trial-1-user") == 200
    fresh_master.services.database.write(lambda tx: tokens.end_allocation_tokens(tx, "1.request.1"))
    assert status("trial-1") == 401
    assert status("trial-1-user") == 401
    assert fresh_master.get("/api/v1/tasks/2.request", "trial-2").status == 200


def test_leftover_token_of_ended_allocation_is_invalid(fresh_master: Master) -> None:
    fresh_master.change("UPDATE allocations SET state = 'TERMINATED' WHERE trial_id = 1")
    assert fresh_master.get("/api/v1/tasks/1.request", "trial-1").status == 401


def test_database_contains_no_plain_tokens(fresh_master: Master) -> None:
    content = str(fresh_master.rows("SELECT * FROM tokens"))
    assert all(token not in content for token in fresh_master.tokens.values())


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "LOCALHOST:9000", "127.0.0.1:8080", "[::1]:8080", "[::1]"]
)
def test_loopback_hosts_with_any_port_are_accepted(served: Master, host: str) -> None:
    assert served.send("GET", "/info", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "localhost:80:80",
        "localhost:",
        "127.0.0.2",
        "0.0.0.0",
        "user@localhost",
        "localhost/x",
        "localhost.",
    ],
)
def test_other_hosts_are_rejected_with_ssh_hint(served: Master, host: str) -> None:
    answer = served.send("GET", "/info", headers={"Host": host})
    assert answer.status == 403
    assert "ssh -L" in answer.error


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost.evil.example", "file://"]
)
def test_foreign_origin_is_rejected(served: Master, origin: str) -> None:
    answer = served.send("GET", "/api/v1/me", token="determined", headers={"Origin": origin})
    assert answer.status == 403


def test_cookie_authenticates_read_requests(served: Master) -> None:
    cookie = {"Cookie": f"a=b; auth={served.tokens['determined']}"}
    assert served.send("GET", "/api/v1/me", headers=cookie).status == 200


def test_cookie_write_requires_own_origin(fresh_master: Master) -> None:
    cookie = {"Cookie": f"auth={fresh_master.tokens['admin']}", "Host": "localhost:8081"}
    path = f"/api/v1/agents/{fresh_master.services.agent_id}/slots/0/disable"
    for origin in (None, "http://localhost:1", "http://127.0.0.1:8081", "https://localhost:8081"):
        headers = cookie if origin is None else {**cookie, "Origin": origin}
        assert fresh_master.send("POST", path, headers=headers).status == 403, origin
    assert fresh_master.rows("SELECT * FROM disabled_slots") == []
    answer = fresh_master.send("POST", path, headers={**cookie, "Origin": "http://localhost:8081"})
    assert answer.status == 200


def test_user_token_precedes_allocation_token(served: Master) -> None:
    both = {
        "Grpc-Metadata-x-allocation-token": f"Bearer {served.tokens['trial-1']}",
        "Authorization": f"Bearer {served.tokens['determined']}",
    }
    assert served.send("GET", "/api/v1/me", headers=both).status == 200
    both["Authorization"] = "Bearer garbage"
    assert served.send("GET", "/api/v1/tasks/1.request", headers=both).status == 401


def test_expired_token_is_rejected(fresh_master: Master) -> None:
    assert fresh_master.get("/api/v1/me", "other").status == 200
    past = (int(time.time()) - 10) * 1_000_000
    fresh_master.change("UPDATE tokens SET expires_us = ?", past)
    assert fresh_master.get("/api/v1/me", "other").status == 401
