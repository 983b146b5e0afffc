"""JSON for an experiment's tabs: rungs, checkpoints, config, code."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dstrial.checkpoint.manifest import MANIFEST_NAME, hash_file
from dstrial.config.documents import Document, read_yaml_text
from dstrial.config.experiment_config.origins import (
    LABEL,
    checked_again,
    config_values,
    explained_rows,
)
from dstrial.config.secrets import masked, masked_json, masked_yaml
from dstrial.errors import ConfigError, DstrialError, RequestError
from dstrial.master.backends.model_definition import list_files, read_start, unpack
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.http.serializers import as_data
from dstrial.master.lifecycle.checkpoint_gc import remaining
from dstrial.master.lifecycle.storages import root_of
from dstrial.master.services import Services
from dstrial.master.store import experiments, trials
from dstrial.master.store.database import Connection
from dstrial.master.store.views import overviews
from dstrial.master.store.views.overviews import Json
from dstrial.master.web import rungs

MAX_TEXT_BYTES = 2**20  # per file
_MAX_FILES = 20_000  # per listing
_MAX_VALUES = 5000  # config values per response
_LAYOUT_FIELDS = (
    "engine_kind",
    "world_size",
    "data_parallel_size",
    "pipeline_stages",
    "model_parallel_size",
    "zero_stage",
    "offload_optimizer",
    "optimizer",
    "train_batch_size",
)


def _read_rungs(connection: Connection, experiment_id: int) -> Json:
    row = experiments.require(connection, experiment_id)
    config = json.loads(row.config)
    searcher = config["searcher"]
    # Another program runs a detached search; the searcher in its config is only a name.
    if row.unmanaged or row.searcher_type not in rungs.WITH_RUNGS:
        return {"brackets": []}
    snapshot = json.loads(row.searcher_snapshot or "{}")
    ids = {trial.request_id: trial.id for trial in trials.of_experiment(connection, experiment_id)}
    return {
        "metric": row.searcher_metric,
        "timeMetric": searcher["time_metric"],
        "divisor": searcher["divisor"],
        "brackets": rungs.rungs_of(
            searcher, snapshot.get("method", {}), frozenset(snapshot.get("closed", ())), ids
        ),
    }


async def get_rungs(request: ApiRequest) -> Json:
    """Return the brackets and rungs of an ASHA search, with the trials in each rung."""
    return await request.services.read(_read_rungs, request.path_params["experiment_id"])


def _layouts(engines: str | None) -> list[Json]:
    found = json.loads(engines) if engines else []
    return [
        {name: layout.get(name) for name in _LAYOUT_FIELDS}
        for layout in (found if isinstance(found, list) else [])
        if isinstance(layout, Mapping)
    ]


async def get_checkpoints(request: ApiRequest) -> Json:
    """Return an experiment's newest checkpoints; ``more`` is true if the list is cut."""

    def read(connection: Connection) -> list[Json]:
        experiment_id = request.path_params["experiment_id"]
        experiments.require(connection, experiment_id)
        return overviews.checkpoints(connection, experiment_id)

    found = await request.services.read(read)
    limit = overviews.MAX_CHECKPOINTS
    shown = [{**row, "layouts": _layouts(row.pop("engines"))} for row in found[:limit]]
    return {"checkpoints": shown, "more": len(found) > limit}


def _verify(services: Services, uuid: str) -> Json:
    with services.database.read() as connection:
        row = overviews.stored_files(connection, uuid)
    if row is None:
        raise RequestError(
            404, f"checkpoint {uuid[:80]!r} is not found; expected one of an experiment's list."
        )
    storage = json.loads(row.config)["checkpoint_storage"]
    root = root_of(storage)
    if root is None:
        return {
            "isWhole": None,
            "text": "Its storage is no directory of this machine; `dstrial checkpoint verify` reads it.",
        }
    trouble = services.storages.trouble(storage)
    if trouble is not None:
        return {"isWhole": None, "text": trouble}
    directory = root / row.uuid
    found = remaining(directory) if directory.is_dir() else {}
    stored = json.loads(row.resources)
    wrong = [name for name, size in stored.items() if not name.endswith("/") and found.get(name) != int(size)]
    if row.state in ("COMPLETED", "PARTIALLY_DELETED") and wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return {"isWhole": False, "text": f"Missing, or of another size: {', '.join(wrong[:3])}{more}."}
    if row.state != "COMPLETED":
        return {"isWhole": None, "text": f"It is {row.state.lower()}, as registered."}
    has_manifest = row.manifest_sha256 is not None and MANIFEST_NAME in stored
    if has_manifest and hash_file(directory / MANIFEST_NAME).sha256 != row.manifest_sha256:
        return {"isWhole": False, "text": "Its manifest is another one than its trial has reported."}
    manifest = (
        "its manifest is the one that its trial has reported"
        if has_manifest
        else "it has no registered manifest"
    )
    return {"isWhole": True, "text": f"All files are there with their sizes, and {manifest}."}


async def get_verification(request: ApiRequest) -> Json:
    """Return whether a checkpoint's files have the registered sizes and manifest.

    ``isWhole`` is null if this cannot be checked. ``text`` is the result for users.
    """
    services, uuid = request.services, request.path_params["uuid"]
    return await services.run(lambda: _verify(services, uuid))


def _explained(services: Services, row: experiments.Experiment, tgz: bytes) -> Json:
    """Return an experiment's config and DeepSpeed configs, with each value's origin.

    An origin is, for example, the submitted config or a default. ``tgz`` is the model definition.
    """
    names, limits = services.secret_names, services.settings.limits
    # Mask secrets first, because problems quote values and are shown to other users.
    template = masked(json.loads(row.template), names) if row.template else None
    effective = json.loads(masked_json(row.config, names))
    original = masked_yaml(row.original_config, names)
    try:
        submitted = read_yaml_text(original, LABEL, limits)
    except ConfigError:  # the config exceeds the current limits, as checked_again() below reports
        submitted = Document(LABEL, None, {})
    values = config_values(effective, submitted, template)
    found: Json = {
        "original": as_data(original),
        "template": as_data(template),
        "effective": as_data(effective),
        "values": as_data(
            [{"key": one.key, "value": one.value, "origin": one.origin} for one in values[:_MAX_VALUES]]
        ),
        "more": len(values) > _MAX_VALUES,
        "deepspeed": [],
        "problem": "",
    }
    if row.unmanaged:
        return found
    with tempfile.TemporaryDirectory(prefix="dstrial-explain-") as name:
        try:
            unpack(tgz, Path(name))
            checked = checked_again(original, template, Path(name), has_files=bool(tgz), limits=limits)
        except DstrialError as error:
            problems = error.problems if isinstance(error, ConfigError) else [str(error)]
            return {**found, "problem": "\n".join(str(one).replace(f"{name}/", "") for one in problems)}
        found["deepspeed"] = [
            {
                "name": key,
                "file": source.label.replace(f"{name}/", ""),
                "equation": result.batch.equation if result.batch else "",
                "rows": [
                    {"key": one.key, "value": one.value, "origin": one.origin.replace(f"{name}/", "")}
                    for one in explained_rows(source, result, names)
                ],
            }
            for key, (source, result) in checked.engines.items()
        ]
    return found


async def get_config(request: ApiRequest) -> Json:
    """Return an experiment's submitted and effective config, and each value's origin.

    ``deepspeed`` contains the output of ``dstrial check --explain`` for each DeepSpeed config. If that fails, ``problem`` says
    why, for example because the config is no longer valid.
    """
    services, experiment_id = request.services, request.path_params["experiment_id"]
    row = await services.read(experiments.require, experiment_id)
    tgz = await services.read(experiments.model_definition, experiment_id)
    return await services.check(lambda: _explained(services, row, tgz))


def listed_files(tgz: bytes) -> Json:
    """List the files of a model definition; ``more`` is true if the list is cut.

    ``tgz`` is the model definition as tar.gz.
    """
    files = list_files(tgz)
    return {
        "files": [
            {"path": file.path, "bytes": file.size, "digest": file.digest} for file in files[:_MAX_FILES]
        ],
        "more": len(files) > _MAX_FILES,
    }


def shown_file(tgz: bytes, path: str) -> Json:
    """Return a model definition's file as text, cut at ``MAX_TEXT_BYTES``.

    The text of a binary file is empty. ``tgz`` is the model definition as tar.gz.
    """
    content, size = read_start(tgz, path, MAX_TEXT_BYTES)
    is_binary = b"\0" in content
    text = "" if is_binary else content.decode("utf-8", "replace")
    return {"path": path, "bytes": size, "text": text, "isBinary": is_binary, "isCut": size > len(content)}


async def get_files(request: ApiRequest) -> Json:
    tgz = await request.services.read(experiments.model_definition, request.path_params["experiment_id"])
    return await request.services.check(lambda: listed_files(tgz))


async def get_file(request: ApiRequest) -> Json:
    path = request.query("path") or ""
    tgz = await request.services.read(experiments.model_definition, request.path_params["experiment_id"])
    found = await request.services.check(lambda: shown_file(tgz, path))
    return {**found, "text": as_data(found["text"])}


_ONE = "//page/experiments/{experiment_id:int}"
routes = [
    route("GET", f"{_ONE}/rungs", get_rungs, access=USER),
    route("GET", f"{_ONE}/checkpoints", get_checkpoints, access=USER),
    route("GET", "//page/checkpoints/{uuid}/look", get_verification, access=USER),
    route("GET", f"{_ONE}/config", get_config, access=USER),
    route("GET", f"{_ONE}/files", get_files, access=USER),
    route("GET", f"{_ONE}/file", get_file, access=USER),
]
