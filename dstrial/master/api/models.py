"""The model registry: models, versions and permissions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from determined.common.api import bindings

from dstrial.config.secrets import SecretNames
from dstrial.errors import RequestError
from dstrial.master.api.metrics import report_json
from dstrial.master.clock import format_us
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields
from dstrial.master.http.messages import Page, message, page_of
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import checkpoint_json, stored
from dstrial.master.store import checkpoints as checkpoint_rows
from dstrial.master.store import models, workspaces
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.reports import metrics

_TEXTS = ("name", "description", "notes")
_VERSION_TEXTS = ("name", "comment", "notes")


def model_json(row: models.ModelInfo) -> dict[str, Any]:
    return message(
        bindings.v1Model,
        id=row.id,
        name=row.name,
        description=row.description,
        notes=row.notes,
        metadata=stored(row.metadata),
        labels=orjson.loads(row.labels),
        archived=bool(row.is_archived),
        creationTime=format_us(row.created_us),
        lastUpdatedTime=format_us(row.updated_us),
        numVersions=row.num_versions,
        userId=row.owner_id,
        username=row.username,
        workspaceId=row.workspace_id,
    )


def _version_json(
    names: SecretNames, connection: Connection, model: models.ModelInfo, row: models.VersionInfo
) -> dict[str, Any]:
    checkpoint = checkpoint_rows.require_checkpoint(connection, row.checkpoint_uuid)
    return message(
        bindings.v1ModelVersion,
        id=row.id,
        version=row.version,
        model=model_json(model),
        checkpoint=checkpoint_json(checkpoint, names),
        name=row.name,
        comment=row.comment,
        notes=row.notes,
        metadata=stored(row.metadata),
        labels=orjson.loads(row.labels),
        creationTime=format_us(row.created_us),
        lastUpdatedTime=format_us(row.updated_us),
        userId=row.owner_id,
        username=row.username,
    )


def _given(body: Fields, texts: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {name: body.text(name) for name in texts}
    found.update(metadata=body.mapping("metadata"), labels=body.texts("labels"))
    return {name: value for name, value in found.items() if value is not None}


def _workspace(connection: Connection, body: Fields) -> int | None:
    """Return the id of the workspace named in the body, if any."""
    name, number = body.text("workspaceName"), body.integer("workspaceId")
    if not name and not number:
        return None
    row = workspaces.by_name(connection, name) if name else workspaces.require(connection, number or 0)
    workspaces.refuse_archived(row, "take another model")
    return int(row.id)


def _open(connection: Connection, name: str) -> models.ModelInfo:
    row = models.require(connection, name)
    if row.is_archived:
        raise RequestError(
            400,
            f"model {row.name!r} is archived; expected one that is not. Take it back from the archive first.",
        )
    return row


async def list_models(request: ApiRequest) -> dict[str, Any]:
    wanted = models.ModelFilter(
        model_id=request.query_int("id") or None,
        archived=request.query_flag("archived"),
        name=request.query("name"),
        description=request.query("description"),
        labels=request.queries("labels"),
        users=request.queries("users"),
        user_ids=request.query_ints("userIds"),
        workspace_ids=request.query_ints("workspaceIds"),
        workspace_names=request.queries("workspaceNames"),
    )
    sort_by = request.query_choice("sortBy", bindings.v1GetModelsRequestSortBy)
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"

    def read(connection: Connection) -> list[models.ModelInfo]:
        for name in wanted.workspace_names:
            workspaces.by_name(connection, name)
        return models.list_models(connection, wanted, sort_by=sort_by, is_descending=is_descending)

    rows = await request.services.read(read)
    page = page_of(len(rows), request.query_int("offset"), request.query_int("limit"))
    return message(
        bindings.v1GetModelsResponse,
        models=[model_json(row) for row in rows[page.start : page.end]],
        pagination=page.to_json(),
    )


async def create_model(request: ApiRequest) -> dict[str, Any]:
    body, user = request.body(), request.user
    given = {"description": "", "notes": "", "metadata": {}, "labels": [], **_given(body, _TEXTS)}
    name = body.required_text("name")

    def write(tx: Transaction) -> models.ModelInfo:
        workspace_id = _workspace(tx.connection, body) or workspaces.DEFAULT_ID
        models.create(tx, owner_id=user.id, workspace_id=workspace_id, **{**given, "name": name})
        return models.require(tx.connection, name)

    return message(bindings.v1PostModelResponse, model=model_json(await request.services.write(write)))


async def show_model(request: ApiRequest) -> dict[str, Any]:
    row = await request.services.read(models.require, request.path_params["model"])
    return message(bindings.v1GetModelResponse, model=model_json(row))


async def patch_model(request: ApiRequest) -> dict[str, Any]:
    body, name = request.body(), request.path_params["model"]
    given = _given(body, _TEXTS)

    def write(tx: Transaction) -> models.ModelInfo:
        row = _open(tx.connection, name)
        if "name" in given:
            models.check_name(tx.connection, given["name"], row.id)
        workspace_id = _workspace(tx.connection, body)
        changes = given if workspace_id is None else {**given, "workspace_id": workspace_id}
        models.change(tx, row.id, **changes)
        return models.require(tx.connection, str(row.id))

    return message(bindings.v1PatchModelResponse, model=model_json(await request.services.write(write)))


def _archive(is_archived: bool) -> Callable[[ApiRequest], Any]:
    async def handle(request: ApiRequest) -> dict[str, Any]:
        name, user = request.path_params["model"], request.user

        def write(tx: Transaction) -> None:
            row = models.require(tx.connection, name)
            require_owner(user, row.owner_id, f"model {row.name!r}")
            models.change(tx, row.id, is_archived=is_archived)

        await request.services.write(write)
        return {}

    return handle


async def delete_model(request: ApiRequest) -> dict[str, Any]:
    """Delete a model and its versions but not their checkpoints."""
    name, user = request.path_params["model"], request.user

    def write(tx: Transaction) -> None:
        row = models.require(tx.connection, name)
        require_owner(user, row.owner_id, f"model {row.name!r}")
        models.delete(tx, row.id)

    await request.services.write(write)
    return {}


async def list_labels(request: ApiRequest) -> dict[str, Any]:
    labels = await request.services.read(models.labels_by_use, request.query_int("workspaceId"))
    return message(bindings.v1GetModelLabelsResponse, labels=labels)


async def list_versions(request: ApiRequest) -> dict[str, Any]:
    name = request.path_params["model"]
    by_time = (
        request.query_choice("sortBy", bindings.v1GetModelVersionsRequestSortBy) == "SORT_BY_CREATION_TIME"
    )
    is_descending = request.query_choice("orderBy", bindings.v1OrderBy) == "ORDER_BY_DESC"
    offset, limit = request.query_int("offset"), request.query_int("limit")

    def read(connection: Connection) -> tuple[dict[str, Any], list[dict[str, Any]], Page]:
        model = models.require(connection, name)
        rows = models.list_versions(connection, model.id, by_time=by_time, is_descending=is_descending)
        page = page_of(len(rows), offset, limit)
        versions = [
            _version_json(request.services.secret_names, connection, model, row)
            for row in rows[page.start : page.end]
        ]
        return model_json(model), versions, page

    model, versions, page = await request.services.read(read)
    return message(
        bindings.v1GetModelVersionsResponse, model=model, modelVersions=versions, pagination=page.to_json()
    )


async def register_version(request: ApiRequest) -> dict[str, Any]:
    body, name, user = request.body(), request.path_params["model"], request.user
    uuid, given = body.required_text("checkpointUuid"), _given(body, _VERSION_TEXTS)

    def write(tx: Transaction) -> dict[str, Any]:
        model = _open(tx.connection, name)
        checkpoint = checkpoint_rows.require_checkpoint(tx.connection, uuid)
        checkpoint_rows.refuse_deleting(tx.connection, checkpoint)
        version = models.add_version(tx, model.id, uuid, user.id, **given)
        model = models.require(tx.connection, str(model.id))
        return _version_json(
            request.services.secret_names,
            tx.connection,
            model,
            models.require_version(tx.connection, model, version),
        )

    return message(bindings.v1PostModelVersionResponse, modelVersion=await request.services.write(write))


def _version_of(connection: Connection, request: ApiRequest) -> tuple[models.ModelInfo, models.VersionInfo]:
    model = models.require(connection, request.path_params["model"])
    return model, models.require_version(connection, model, request.path_params["version"])


async def show_version(request: ApiRequest) -> dict[str, Any]:
    def read(connection: Connection) -> dict[str, Any]:
        return _version_json(request.services.secret_names, connection, *_version_of(connection, request))

    return message(bindings.v1GetModelVersionResponse, modelVersion=await request.services.read(read))


async def patch_version(request: ApiRequest) -> dict[str, Any]:
    given = _given(request.body(), _VERSION_TEXTS)

    def write(tx: Transaction) -> dict[str, Any]:
        _open(tx.connection, request.path_params["model"])
        model, row = _version_of(tx.connection, request)
        models.change_version(tx, row.id, model.id, **given)
        return _version_json(
            request.services.secret_names, tx.connection, *_version_of(tx.connection, request)
        )

    return message(bindings.v1PatchModelVersionResponse, modelVersion=await request.services.write(write))


async def delete_version(request: ApiRequest) -> dict[str, Any]:
    user = request.user

    def write(tx: Transaction) -> None:
        model, row = _version_of(tx.connection, request)
        if user.id != model.owner_id:
            require_owner(user, row.owner_id, f"version {row.version} of model {model.name!r}")
        models.delete_version(tx, row.id, model.id)

    await request.services.write(write)
    return {}


async def list_metrics(request: ApiRequest) -> dict[str, Any]:
    group = request.query("metricGroup") or None
    kind = request.query_choice("trialSourceInfoType", bindings.v1TrialSourceInfoType)

    def read(connection: Connection) -> list[metrics.Report]:
        model, row = _version_of(connection, request)
        trial_ids = checkpoint_rows.users_of_version(connection, model.id, row.version, kind)
        return metrics.reports(connection, trial_ids, group)

    rows = await request.services.read(read)
    return message(
        bindings.v1GetTrialMetricsByModelVersionResponse, metrics=[report_json(row, group) for row in rows]
    )


_ONE = "/models/{model}"
_VERSION = f"{_ONE}/versions/{{version:int}}"
routes = [
    route("GET", "/models", list_models, access=USER),
    route("POST", "/models", create_model, access=USER),
    route("GET", "/model/labels", list_labels, access=USER),
    route("GET", _ONE, show_model, access=USER),
    route("PATCH", _ONE, patch_model, access=USER),
    route("DELETE", _ONE, delete_model, access=USER),
    route("POST", f"{_ONE}/archive", _archive(True), access=USER),
    route("POST", f"{_ONE}/unarchive", _archive(False), access=USER),
    route("GET", f"{_ONE}/versions", list_versions, access=USER),
    route("POST", f"{_ONE}/versions", register_version, access=USER),
    route("GET", _VERSION, show_version, access=USER),
    route("PATCH", _VERSION, patch_version, access=USER),
    route("DELETE", _VERSION, delete_version, access=USER),
    route("GET", f"{_VERSION}/metrics", list_metrics, access=USER),
]
