"""Routes for the model registry: models, their versions, and labels."""

from __future__ import annotations

from typing import Any

import orjson
from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.api.trials import report_json
from dstrial.master.clock import format_us
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message
from dstrial.master.http.router import USER, ApiRequest, reads, route, writes
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
    connection: Connection, request: ApiRequest, model: models.ModelInfo, row: models.VersionInfo
) -> dict[str, Any]:
    checkpoint = checkpoint_rows.require_checkpoint(connection, row.checkpoint_uuid)
    return message(
        bindings.v1ModelVersion,
        id=row.id,
        version=row.version,
        model=model_json(model),
        checkpoint=checkpoint_json(checkpoint, request.services.secret_names),
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


def _given_fields(body: Fields, texts: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {name: body.text(name) for name in texts}
    found.update(metadata=body.mapping("metadata"), labels=body.texts("labels"))
    return {name: value for name, value in found.items() if value is not None}


def _given_workspace_id(connection: Connection, body: Fields) -> int | None:
    """Return the id of the workspace that a request names; None without a workspace.

    Raises ``InvalidError`` if the workspace is archived.
    """
    name, number = body.text("workspaceName"), body.integer("workspaceId")
    if not name and not number:
        return None
    row = workspaces.by_name(connection, name) if name else workspaces.require(connection, number or 0)
    workspaces.refuse_archived(row, "take another model")
    return int(row.id)


def _unarchived_model(connection: Connection, request: ApiRequest) -> models.ModelInfo:
    row = _model_in_path(connection, request)
    if row.is_archived:
        raise RequestError(
            400,
            f"model {row.name!r} is archived; expected one that is not. Take it back from the archive first.",
        )
    return row


@reads
def list_models(connection: Connection, request: ApiRequest) -> dict[str, Any]:
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
    for name in wanted.workspace_names:
        workspaces.by_name(connection, name)
    found = models.list_models(connection, wanted, sort_by=sort_by, is_descending=request.is_descending)
    rows, pagination = request.page(found)
    return message(
        bindings.v1GetModelsResponse, models=[model_json(row) for row in rows], pagination=pagination
    )


@writes
def create_model(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    given = {"description": "", "notes": "", "metadata": {}, "labels": [], **_given_fields(body, _TEXTS)}
    given["name"] = body.required_text("name")
    workspace_id = _given_workspace_id(tx.connection, body) or workspaces.DEFAULT_ID
    models.create(tx, owner_id=request.user.id, workspace_id=workspace_id, **given)
    created = models.require(tx.connection, given["name"])
    return message(bindings.v1PostModelResponse, model=model_json(created))


def _model_in_path(connection: Connection, request: ApiRequest) -> models.ModelInfo:
    return models.require(connection, request.path_params["model"])


@reads
def show_model(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    return message(bindings.v1GetModelResponse, model=model_json(_model_in_path(connection, request)))


@writes
def patch_model(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    given = _given_fields(body, _TEXTS)
    row = _unarchived_model(tx.connection, request)
    if "name" in given:
        models.check_name(tx.connection, given["name"], row.id)
    workspace_id = _given_workspace_id(tx.connection, body)
    if workspace_id is not None:
        given["workspace_id"] = workspace_id
    models.change(tx, row.id, **given)
    changed = models.require(tx.connection, str(row.id))
    return message(bindings.v1PatchModelResponse, model=model_json(changed))


def _own_model(connection: Connection, request: ApiRequest) -> models.ModelInfo:
    row = _model_in_path(connection, request)
    require_owner(request.user, row.owner_id, f"model {row.name!r}")
    return row


@writes
def archive_model(tx: Transaction, request: ApiRequest) -> None:
    models.change(
        tx,
        _own_model(tx.connection, request).id,
        is_archived=request.route.path.endswith("/archive"),
    )


@writes
def delete_model(tx: Transaction, request: ApiRequest) -> None:
    """Delete a model and its versions; the versions' checkpoints stay."""
    models.delete(tx, _own_model(tx.connection, request).id)


@reads
def list_labels(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    labels = models.labels_by_use(connection, request.query_int("workspaceId"))
    return message(bindings.v1GetModelLabelsResponse, labels=labels)


@reads
def list_versions(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    sort_by = request.query_choice("sortBy", bindings.v1GetModelVersionsRequestSortBy)
    model = _model_in_path(connection, request)
    rows, pagination = request.page(
        models.list_versions(
            connection,
            model.id,
            by_time=sort_by == "SORT_BY_CREATION_TIME",
            is_descending=request.is_descending,
        )
    )
    return message(
        bindings.v1GetModelVersionsResponse,
        model=model_json(model),
        modelVersions=[_version_json(connection, request, model, row) for row in rows],
        pagination=pagination,
    )


@writes
def register_version(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    uuid, given = body.required_text("checkpointUuid"), _given_fields(body, _VERSION_TEXTS)
    model = _unarchived_model(tx.connection, request)
    checkpoint = checkpoint_rows.require_checkpoint(tx.connection, uuid)
    checkpoint_rows.refuse_deleting(tx.connection, checkpoint)
    version = models.add_version(tx, model.id, uuid, request.user.id, **given)
    model = models.require(tx.connection, str(model.id))
    row = models.require_version(tx.connection, model, version)
    return message(
        bindings.v1PostModelVersionResponse,
        modelVersion=_version_json(tx.connection, request, model, row),
    )


def _version_in_path(
    connection: Connection, request: ApiRequest
) -> tuple[models.ModelInfo, models.VersionInfo]:
    model = _model_in_path(connection, request)
    return model, models.require_version(connection, model, request.path_params["version"])


@reads
def show_version(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    shown = _version_json(connection, request, *_version_in_path(connection, request))
    return message(bindings.v1GetModelVersionResponse, modelVersion=shown)


@writes
def patch_version(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    given = _given_fields(request.body(), _VERSION_TEXTS)
    _unarchived_model(tx.connection, request)
    model, row = _version_in_path(tx.connection, request)
    models.change_version(tx, row.id, model.id, **given)
    shown = _version_json(tx.connection, request, *_version_in_path(tx.connection, request))
    return message(bindings.v1PatchModelVersionResponse, modelVersion=shown)


@writes
def delete_version(tx: Transaction, request: ApiRequest) -> None:
    model, row = _version_in_path(tx.connection, request)
    if request.user.id != model.owner_id:
        require_owner(request.user, row.owner_id, f"version {row.version} of model {model.name!r}")
    models.delete_version(tx, row.id, model.id)


@reads
def list_metrics(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    group = request.query("metricGroup") or None
    kind = request.query_choice("trialSourceInfoType", bindings.v1TrialSourceInfoType)
    model, row = _version_in_path(connection, request)
    trial_ids = checkpoint_rows.users_of_version(connection, model.id, row.version, kind)
    reports = [report_json(one, group) for one in metrics.reports(connection, trial_ids, group)]
    return message(bindings.v1GetTrialMetricsByModelVersionResponse, metrics=reports)


_ONE = "/models/{model}"
_VERSION = f"{_ONE}/versions/{{version:int}}"
routes = [
    route("GET", "/models", list_models, access=USER),
    route("POST", "/models", create_model, access=USER),
    route("GET", "/model/labels", list_labels, access=USER),
    route("GET", _ONE, show_model, access=USER),
    route("PATCH", _ONE, patch_model, access=USER),
    route("DELETE", _ONE, delete_model, access=USER),
    route("POST", f"{_ONE}/archive", archive_model, access=USER),
    route("POST", f"{_ONE}/unarchive", archive_model, access=USER),
    route("GET", f"{_ONE}/versions", list_versions, access=USER),
    route("POST", f"{_ONE}/versions", register_version, access=USER),
    route("GET", _VERSION, show_version, access=USER),
    route("PATCH", _VERSION, patch_version, access=USER),
    route("DELETE", _VERSION, delete_version, access=USER),
    route("GET", f"{_VERSION}/metrics", list_metrics, access=USER),
]
