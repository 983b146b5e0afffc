"""API and SDK requests that create, edit and list users."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from determined.common import api
from determined.common.api import bindings, errors
from serving import Master

pytestmark = pytest.mark.process


def _user_id(master: Master, username: str) -> int:
    return int(master.rows("SELECT id FROM users WHERE username = ?", username)[0]["id"])


def test_password_change_revokes_other_tokens_of_user(fresh_master: Master) -> None:
    user_id = _user_id(fresh_master, "determined")
    answer = fresh_master.send(
        "PATCH", f"/api/v1/users/{user_id}", {"password": "Password-3"}, token="determined"
    )
    assert answer.status == 200
    assert fresh_master.get("/api/v1/me", "determined").status == 200
    assert fresh_master.get("/api/v1/me", "trial-1-user").status == 401
    assert fresh_master.get("/api/v1/tasks/1.request", "trial-1").status == 200
    fresh_master.send("PATCH", f"/api/v1/users/{user_id}", {"password": "Password-4"}, token="admin")
    assert fresh_master.get("/api/v1/me", "determined").status == 401
    assert fresh_master.get("/api/v1/me", "admin").status == 200


def test_non_admin_can_edit_only_own_display_name(fresh_master: Master) -> None:
    own, admin = _user_id(fresh_master, "other"), _user_id(fresh_master, "admin")

    def patch(user_id: int, body: dict[str, object]) -> int:
        return fresh_master.send("PATCH", f"/api/v1/users/{user_id}", body, token="other").status

    assert patch(own, {"displayName": "Me"}) == 200
    assert patch(own, {"display_name": "I"}) == 200
    assert fresh_master.rows("SELECT display_name FROM users WHERE id = ?", own) == [{"display_name": "I"}]
    assert patch(own, {"admin": True}) == 403
    assert patch(own, {"active": False}) == 403
    assert patch(own, {"username": "boss"}) == 403
    assert patch(admin, {"displayName": "x"}) == 403
    assert patch(admin, {"password": "Password-5"}) == 403


@pytest.mark.parametrize(
    "name", ["Admin", " admin ", "DETERMINED", "the BOSS", "\u0430dmin", "x\ny", "x" * 300]
)
def test_display_name_confusable_or_malformed_is_refused(
    fresh_master: Master, session_of: Callable[[str], api.Session], name: str
) -> None:
    own, admin = _user_id(fresh_master, "other"), _user_id(fresh_master, "admin")
    boss = fresh_master.send("PATCH", f"/api/v1/users/{admin}", {"displayName": "The Boss"}, token="admin")
    assert boss.status == 200

    with pytest.raises(errors.APIException, match="displayName is"):
        bindings.patch_PatchUser(session_of("other"), body=bindings.v1PatchUser(displayName=name), userId=own)
    new = {"user": {"username": "new", "displayName": name}, "password": "Password-1"}
    assert fresh_master.send("POST", "/api/v1/users", new, token="admin").status == 400

    for again in ("Other", " renamed display-name ", ""):
        answer = fresh_master.send("PATCH", f"/api/v1/users/{own}", {"displayName": again}, token="other")
        assert answer.json["user"]["displayName"] == again.strip()


@pytest.mark.parametrize(
    ("user", "password", "status"),
    [
        ({"username": "admin"}, "Password-1", 409),
        ({"username": "ADMIN"}, "Password-1", 409),
        ({"username": ""}, "Password-1", 400),
        ({"username": "a\nb"}, "Password-1", 400),
        ({"username": "x" * 300}, "Password-1", 400),
        ({"username": "blank"}, "", 400),
        ({"username": "none"}, None, 400),
        ({"username": "remote", "remote": True}, "Password-1", 501),
        ({"username": 1}, "Password-1", 400),
        (None, "Password-1", 400),
    ],
)
def test_create_user_invalid_is_refused(served: Master, user: object, password: object, status: int) -> None:
    body = {"user": user, "password": password, "isHashed": False}
    assert served.send("POST", "/api/v1/users", body, token="admin").status == status
    assert len(served.rows("SELECT * FROM users")) == 3


def test_last_active_admin_cannot_be_demoted_or_deactivated(fresh_master: Master) -> None:
    path = f"/api/v1/users/{_user_id(fresh_master, 'admin')}"
    for body in ({"admin": False}, {"active": False}):
        assert fresh_master.send("PATCH", path, body, token="admin").status == 409
    other = _user_id(fresh_master, "other")
    assert fresh_master.send("PATCH", f"/api/v1/users/{other}", {"admin": True}, token="admin").status == 200
    assert fresh_master.get("/api/v1/me", "other").json["user"]["admin"] is True
    assert fresh_master.send("PATCH", path, {"admin": False}, token="admin").status == 200


def test_list_users_paginates_and_sorts(served: Master) -> None:
    answer = served.get("/api/v1/users?limit=2&offset=1&order_by=ORDER_BY_DESC").json
    assert [user["username"] for user in answer["users"]] == ["determined", "admin"]
    assert answer["pagination"] == {"offset": 1, "limit": 2, "startIndex": 1, "endIndex": 3, "total": 3}
    assert served.get("/api/v1/users?sortBy=SORT_BY_NONSENSE").status == 400
