"""What a user has set in Determined's web interface comes back to that user, and to nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from determined.common import api
from determined.common.api import bindings, errors
from serving import Master

from dstrial.master.store import user_settings

pytestmark = pytest.mark.process


def session_of(master: Master, username: str = "determined") -> api.Session:
    return api.Session(master.address, username, master.tokens[username], None)


def store(session: api.Session, *settings: tuple[str, str, str]) -> None:
    given = [bindings.v1UserWebSetting(key=k, storagePath=path, value=v) for path, k, v in settings]
    bindings.post_PostUserSetting(session, body=bindings.v1PostUserSettingRequest(settings=given))


def stored(session: api.Session) -> list[tuple[str | None, str, str | None]]:
    return [(one.storagePath, one.key, one.value) for one in bindings.get_GetUserSetting(session).settings]


def test_settings_are_kept_by_page_and_key_and_are_the_users_own(fresh_master: Master) -> None:
    session, other = session_of(fresh_master), session_of(fresh_master, "other")
    assert stored(session) == []
    store(session, ("global", "mode", '"dark"'), ("table", "columns", '["id"]'), ("table", "mode", "1"))
    store(session, ("table", "columns", '["id", "name\\u001b"]'), ("table", "mode", ""))
    store(other, ("global", "mode", '"light"'))

    assert stored(session) == [
        ("global", "mode", '"dark"'),
        ("table", "columns", '["id", "name\\u001b"]'),
    ]
    bindings.post_ResetUserSetting(session)
    assert stored(session) == []
    assert stored(other) == [("global", "mode", '"light"')]


def test_settings_have_a_bound_and_what_is_too_much_changes_nothing(fresh_master: Master) -> None:
    session = session_of(fresh_master)
    store(session, ("", "a", "x" * (user_settings.MAX_BYTES - 1)))
    with pytest.raises(errors.APIException, match=f"expected at most {user_settings.MAX_BYTES}"):
        store(session, ("", "a", "1"), ("", "b", "x" * user_settings.MAX_BYTES))
    assert [len(value or "") for _, _, value in stored(session)] == [user_settings.MAX_BYTES - 1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"settings": "x"},
        {"settings": [{"value": "1"}]},
        {"settings": [{"key": "", "value": "1"}]},
        {"settings": [{"key": "k" * 300}]},
        {"settings": [{"key": "k", "value": 1}]},
    ],
)
def test_what_is_no_setting_is_refused(served: Master, body: dict[str, Any]) -> None:
    answer = served.send("POST", "/api/v1/users/setting", body, token="determined")
    assert answer.status == 400, answer.content


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "setting"), ("POST", "setting"), ("POST", "setting/reset"), ("POST", "activity")],
)
def test_settings_are_open_to_users_only(served: Master, method: str, path: str) -> None:
    assert served.send(method, f"/api/v1/users/{path}", {}).status == 401
    assert served.send(method, f"/api/v1/users/{path}", {}, token="trial-1").status == 403


def test_the_project_that_was_looked_at_last_is_the_first(fresh_master: Master) -> None:
    session, other = session_of(fresh_master), session_of(fresh_master, "other")
    made = fresh_master.send("POST", "/api/v1/workspaces", {"name": "w"}, token="determined").json
    workspace = f"/api/v1/workspaces/{made['workspace']['id']}/projects"
    ids = [
        fresh_master.send("POST", workspace, {"name": name}, token="determined").json["project"]["id"]
        for name in ("p", "q")
    ]

    def look(project_id: int) -> None:
        activity = bindings.v1PostUserActivityRequest(
            activityType=bindings.v1ActivityType.GET,
            entityId=project_id,
            entityType=bindings.v1EntityType.PROJECT,
        )
        bindings.post_PostUserActivity(session, body=activity)

    def recent(asking: api.Session) -> list[int]:
        return [one.id for one in bindings.get_GetProjectsByUserActivity(asking).projects or []]

    assert recent(session) == [1]
    for project_id in (*ids, ids[0]):
        look(project_id)
    assert recent(session) == [ids[0], ids[1], 1]
    assert recent(other) == []
    with pytest.raises(errors.NotFoundException):
        look(99)


@pytest.mark.parametrize(
    "body",
    [{}, {"activityType": "ACTIVITY_TYPE_GET", "entityType": "ENTITY_TYPE_UNSPECIFIED", "entityId": 1},
     {"activityType": "ACTIVITY_TYPE_GET", "entityType": "ENTITY_TYPE_PROJECT", "entityId": "x"},
     {"activityType": "LOOK", "entityType": "ENTITY_TYPE_PROJECT", "entityId": 1}],
)  # fmt: skip
def test_what_is_no_activity_is_refused(served: Master, body: dict[str, Any]) -> None:
    assert served.send("POST", "/api/v1/users/activity", body, token="determined").status == 400
