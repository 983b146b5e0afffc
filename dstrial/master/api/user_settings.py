"""What a user has set and looked at in Determined's web interface."""

from __future__ import annotations

from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.http.messages import message
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import as_data
from dstrial.master.store import projects, user_settings
from dstrial.master.store.database import Transaction
from dstrial.master.store.user_settings import Setting

_MAX_NAME = 256
_MAX_BODY_BYTES = 2 * user_settings.MAX_BYTES
_PROJECT = bindings.v1EntityType.PROJECT.value


async def show(request: ApiRequest) -> dict[str, Any]:
    """``GET users/setting``: all of the user who asks."""
    rows = await request.services.read(user_settings.of_user, request.user.id)
    settings = [
        message(
            bindings.v1UserWebSetting,
            key=as_data(row.key),
            storagePath=as_data(row.storage_path),
            value=as_data(row.value),
        )
        for row in rows
    ]
    return message(bindings.v1GetUserSettingResponse, settings=settings)


async def store(request: ApiRequest) -> dict[str, Any]:
    """``POST users/setting``: keep some, the others stay."""
    body, user_id = request.body(), request.user.id
    given = body.field_list("settings")
    if given is None:
        raise body.wrong("settings", "a list of settings")
    settings = []
    for one in given:
        key, path = one.required_text("key"), one.text("storagePath") or ""
        if not key or len(key) > _MAX_NAME or len(path) > _MAX_NAME:
            raise RequestError(
                400,
                f"a setting has a key of {len(key)} and a storagePath of {len(path)} characters; expected 1 to {_MAX_NAME}, "
                f"and at most {_MAX_NAME}. Choose shorter ones.",
            )
        settings.append(Setting(path, key, one.text("value") or ""))
    await request.services.write(lambda tx: user_settings.store(tx, user_id, settings))
    return {}


async def reset(request: ApiRequest) -> dict[str, Any]:
    """``POST users/setting/reset``: forget all of the user who asks."""
    user_id = request.user.id
    await request.services.write(lambda tx: user_settings.reset(tx, user_id))
    return {}


async def note_activity(request: ApiRequest) -> dict[str, Any]:
    """``POST users/activity``: the user looks at a project."""
    body, user_id = request.body(), request.user.id
    kind = body.choice("entityType", bindings.v1EntityType)
    if kind != _PROJECT or body.choice("activityType", bindings.v1ActivityType) is None:
        raise body.wrong("entityType", f"{_PROJECT}, and an activityType")
    project_id = body.required_integer("entityId", 1, 2**31 - 1)

    def write(tx: Transaction) -> None:
        projects.require(tx.connection, project_id)
        projects.note_view(tx, project_id, user_id)

    await request.services.write(write)
    return {}


routes = [
    route("GET", "/users/setting", show, access=USER),
    route("POST", "/users/setting", store, access=USER, max_body_bytes=_MAX_BODY_BYTES),
    route("POST", "/users/setting/reset", reset, access=USER),
    route("POST", "/users/activity", note_activity, access=USER),
]
