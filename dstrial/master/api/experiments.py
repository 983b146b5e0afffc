"""Routes for experiments: submit, list, show, change, continue, pause, delete."""

from __future__ import annotations

import base64
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from determined.common.api import bindings

from dstrial.config.diagnostics import Diagnostics
from dstrial.config.documents import Document, read_yaml_text
from dstrial.config.experiment_config.environment import INTERPRETER_VARIABLE
from dstrial.config.experiment_config.storage import merged_storage
from dstrial.config.experiment_config.submission import (
    LABEL,
    MasterDefaults,
    Submission,
    check_submission,
    continued_config,
    read_override,
    search_section,
)
from dstrial.config.merge import merge_template
from dstrial.config.secrets import MASK, masked, masked_yaml, unmasked_yaml
from dstrial.errors import ConfigError, ConfigProblem, RequestError
from dstrial.master.api.trials import MAX_LOG_DAYS
from dstrial.master.backends.model_definition import pack, unpack
from dstrial.master.clock import format_us, now_us
from dstrial.master.http.access import require_owner
from dstrial.master.http.fields import Fields, shown
from dstrial.master.http.responses import Page, message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, Handler, reads, route, writes
from dstrial.master.http.serializers import as_data, experiment_json, stored_states
from dstrial.master.lifecycle import detached_runs, experiments, resume
from dstrial.master.scheduler.resource_requests import refuse_unsatisfiable, request_of_config
from dstrial.master.services import Services
from dstrial.master.store import experiments as experiment_rows
from dstrial.master.store import projects, workspaces
from dstrial.master.store import trials as trial_rows
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.views import listings
from dstrial.resume.metadata import SavedRun
from dstrial.search import PreviewedTrials, preview

_MAX_SUBMISSION_BYTES = 130 * 2**20  # limit of a request with a config and files

Action: TypeAlias = "Callable[[Transaction, int], Any]"  # changes the experiment that has the id


def validated_submission(
    services: Services,
    config: str,
    tgz: bytes,
    resumed: SavedRun | None = None,
    *,
    template: Mapping[str, Any] | None = None,
    storage: Mapping[str, Any] | None = None,
    is_detached: bool = False,
    document: Document | None = None,
    active: Mapping[str, Any] | None = None,
) -> Submission:
    """Validate a YAML config and model definition; slow, so call it in a thread.

    Args:
        services: the master's services.
        config: the experiment config, as YAML text.
        tgz: the model definition, as tar.gz; may be empty.
        resumed: the checkpoint from which the first trial starts; None to start without a checkpoint.
        template: supplies keys that the config lacks.
        storage: the workspace's ``checkpoint_storage``, which supplies keys that the config lacks.
        is_detached: whether a script of the user runs the trials, so that slots and interpreter do not matter.
        document: the parsed ``config``, which is modified in place; if None, the function parses ``config``.
        active: the complete config of an experiment to continue, from which ``config`` was made.

    Raises:
        ConfigError: the config is invalid; lists all problems.
        RequestError: the model definition cannot be unpacked.
    """
    with tempfile.TemporaryDirectory(prefix="dstrial-check-") as name:
        context_dir = Path(name)
        unpack(tgz, context_dir)
        try:
            submission = check_submission(
                config,
                context_dir=context_dir,
                defaults=_defaults(services, storage, active),
                num_slots=None if is_detached else len(services.slots),
                resumed=resumed,
                template=template,
                is_detached=is_detached,
                document=document,
                has_files=bool(tgz),
            )
        except ConfigError as error:
            raise ConfigError([_strip_temporary_path(problem, name) for problem in error.problems]) from error
    pool = submission.config["resources"]["resource_pool"]
    if pool and pool != services.settings.pool_name:
        raise RequestError(
            400,
            f"resources.resource_pool is {pool!r}; expected {services.settings.pool_name!r}, the only pool. Remove it.",
        )
    if submission.interpreter is not None and not is_detached:
        _require_interpreter(submission.interpreter)
    return submission


def _require_interpreter(interpreter: str) -> None:
    if not Path(interpreter).is_absolute() or shutil.which(interpreter) is None:
        raise ConfigError(
            [
                ConfigProblem(
                    f"environment.environment_variables: {INTERPRETER_VARIABLE}",
                    interpreter,
                    "the absolute path of a Python",
                    "Take the output of `which python3`.",
                )
            ]
        )


def _defaults(
    services: Services, storage: Mapping[str, Any] | None, active: Mapping[str, Any] | None
) -> MasterDefaults:
    defaults = services.settings.defaults(services.state_dir)
    if active is not None:
        storage = active.get("checkpoint_storage") or defaults.checkpoint_storage
        return dataclasses.replace(defaults, checkpoint_storage=storage, environment_variables=())
    if storage is None:
        return defaults
    return dataclasses.replace(
        defaults, checkpoint_storage=merged_storage(storage, defaults.checkpoint_storage)
    )


def _strip_temporary_path(problem: ConfigProblem, context_dir: str) -> ConfigProblem:
    texts = (problem.where, problem.got, problem.expected, problem.fix)
    return ConfigProblem(
        *(text.replace(f"{context_dir}/", "").replace(context_dir, "the model definition") for text in texts)
    )


async def shown_experiment(services: Services, experiment_id: int) -> dict[str, Any]:
    row, trial_ids, external_id = await services.read(_read_with_trials, experiment_id)
    found = (await _experiments_json(services, [row]))[0]
    # Lists do not contain trial ids, as in Determined 0.38.1: searches may have thousands.
    return {**found, "trialIds": trial_ids, "externalTrialId": external_id}


def _read_with_trials(
    connection: Connection, experiment_id: int
) -> tuple[listings.ListedExperiment, list[int], str | None]:
    """Return an experiment's row, its trial ids, and its only trial's external id.

    The external id is None if the experiment does not have exactly one trial.
    """
    row = listings.get_experiment(connection, experiment_id)
    if row is None:
        experiment_rows.require(connection, experiment_id)
        raise RequestError(404, f"experiment {experiment_id} is not found.")
    ids = trial_rows.ids_of(connection, experiment_id)
    return row, ids, trial_rows.require(connection, ids[0]).external_id if len(ids) == 1 else None


async def _experiments_json(
    services: Services, rows: Sequence[listings.ListedExperiment]
) -> list[dict[str, Any]]:
    return await services.check(lambda: [experiment_json(services, row) for row in rows])


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """Result of ``prepare``: a validated submission, and other values for storing it."""

    submission: Submission
    tgz: bytes  # model definition
    project: projects.ProjectInfo
    findings: Diagnostics  # collects problems of the config; empty at first
    may_wait: bool  # whether to accept the experiment although it requests more slots than exist now
    shown_config: dict[str, Any]  # complete config with masked secrets


def prepare(
    services: Services,
    config: str,
    files: Sequence[Mapping[str, Any]],
    project_id: int | None,
    *,
    parent_id: int | None = None,
    template_name: str | None = None,
    is_detached: bool = False,
) -> Prepared:
    """Validate a submitted YAML config and its files; slow, so call it in a thread.

    An empty ``config`` or ``files`` is copied from experiment ``parent_id``. Template ``template_name`` supplies missing keys.

    Raises:
        ConfigError: the config is invalid; lists all problems.
        RequestError: the model definition cannot be packed or unpacked.
    """
    tgz = pack(files)
    template: dict[str, Any] | None = None
    parent: experiment_rows.Experiment | None = None
    with services.database.read() as connection:
        if template_name:
            template = json.loads(workspaces.require_template(connection, template_name).config)
        if parent_id is not None:
            parent = experiment_rows.require(connection, parent_id)
            if not config:
                config, template = parent.original_config, template or json.loads(parent.template or "null")
            tgz = tgz or experiment_rows.model_definition(connection, parent_id)
        config = _unmask_secrets(config, template, parent)
        document, given = _parse_with_template(config, template)
        resumed = None if is_detached else resume.of_submission(connection, given)
        project = experiments.project_of_config(connection, project_id, given)
        storage = _storage_of(connection, project.workspace_id)
    submission = validated_submission(
        services,
        config,
        tgz,
        resumed,
        template=template,
        storage=storage,
        is_detached=is_detached,
        document=document,
    )
    may_wait = submission.exceeds_slots or (resumed is not None and resumed.keeps_batch)
    shown_config = masked(submission.config, services.secret_names)
    return Prepared(submission, tgz, project, Diagnostics(document.lines, LABEL), may_wait, shown_config)


async def create_experiment(request: ApiRequest) -> dict[str, Any]:
    body, services = request.body(), request.services
    if body.flag("unmanaged"):
        return await create_detached(request, body, None)
    config, files, project_id = body.text("config") or "", _files(body), body.integer("projectId")
    parent_id, template = body.integer("parentId") or None, body.text("template")
    prepared = await services.check(
        lambda: prepare(services, config, files, project_id, parent_id=parent_id, template_name=template)
    )
    submission = prepared.submission
    wanted = request_of_config(submission.config, services.backend.nodes(), may_wait=prepared.may_wait)
    await refuse_unsatisfiable(services, wanted, prepared.findings)
    if body.flag("validateOnly"):
        experiment = await services.check(lambda: _preview_json(request, prepared))
    else:
        experiment_id = await services.write(
            lambda tx: experiments.create(
                tx,
                submission=submission,
                tgz=prepared.tgz,
                owner_id=request.user.id,
                activate=body.flag("activate") is not False,
                parent_id=parent_id,
                project_id=prepared.project.id,
            )
        )
        experiment = await shown_experiment(services, experiment_id)
    return message(
        bindings.v1CreateExperimentResponse,
        config=as_data(prepared.shown_config),
        experiment=experiment,
        warnings=["LAUNCH_WARNING_CURRENT_SLOTS_EXCEEDED"] if submission.exceeds_slots else [],
    )


async def create_detached(request: ApiRequest, body: Fields, external_id: str | None) -> dict[str, Any]:
    """Create an experiment whose trials a script runs, or return an existing one.

    ``external_id`` is an id that the script chose, or None. An experiment with this id is returned instead of a new one. The
    result has the fields of ``v1CreateExperimentResponse``.
    """
    services = request.services
    config, project_id = body.text("config") or "", body.integer("projectId")
    prepared = await services.check(lambda: prepare(services, config, (), project_id, is_detached=True))
    experiment_id = await services.write(
        lambda tx: detached_runs.create(
            tx,
            submission=prepared.submission,
            owner_id=request.user.id,
            project_id=prepared.project.id,
            external_id=external_id,
        )
    )
    experiment = await shown_experiment(services, experiment_id)
    return message(
        bindings.v1CreateExperimentResponse, config=experiment["config"], experiment=experiment, warnings=[]
    )


def _files(body: Fields) -> list[Any]:
    files = body.items_of("modelDefinition") or []
    if not all(isinstance(file, dict) for file in files):
        raise body.wrong("modelDefinition", "a list of files")
    return files


def _parse_with_template(config: str, template: Mapping[str, Any] | None) -> tuple[Document, dict[str, Any]]:
    """Return the parsed YAML config, and its values merged over the template's.

    If the config is not a mapping, the values are {}.
    """
    document = read_yaml_text(config, LABEL)
    if not isinstance(document.value, dict):
        return document, {}
    return document, document.value if template is None else merge_template(template, document.value)


def _unmask_secrets(
    config: str,
    template: Mapping[str, Any] | None,
    parent: experiment_rows.Experiment | None = None,
) -> str:
    """Return a YAML config in which secrets replace their masks.

    The secrets are those of the template and of ``parent``, the experiment whose config the user may have copied.
    """
    if MASK not in config:
        return config
    sources: list[Any] = []
    if parent is not None:
        original = read_yaml_text(parent.original_config, LABEL).value
        sources += [original, json.loads(parent.template or "null"), json.loads(parent.config)]
    return unmasked_yaml(config, [*sources, template], LABEL)


def _storage_of(connection: Connection, workspace_id: int) -> dict[str, Any] | None:
    text = workspaces.require(connection, workspace_id).checkpoint_storage
    storage: dict[str, Any] | None = None if text is None else json.loads(text)
    return storage


def _preview_json(request: ApiRequest, prepared: Prepared) -> dict[str, Any]:
    config, project, submission = prepared.shown_config, prepared.project, prepared.submission
    return message(
        bindings.v1Experiment,
        archived=False,
        config=as_data(config),
        id=0,
        jobId="",
        name=config["name"],
        numTrials=0,
        originalConfig=as_data(masked_yaml(submission.original, request.services.secret_names)),
        projectId=project.id,
        projectName=project.name,
        projectOwnerId=project.owner_id,
        searcherType=config["searcher"]["name"],
        startTime=format_us(now_us()),
        state="STATE_UNSPECIFIED",
        username=request.user.username,
        workspaceId=project.workspace_id,
        workspaceName=project.workspace_name,
    )


async def list_experiments(request: ApiRequest) -> dict[str, Any]:
    project_id = request.query_int("projectId") or None
    above = request.query_int("experimentIdFilter.gt")
    at_least = request.query_int("experimentIdFilter.gte")
    below = request.query_int("experimentIdFilter.lt")
    at_most = request.query_int("experimentIdFilter.lte")
    wanted = listings.ExperimentFilter(
        archived=request.query_flag("archived"),
        # A request for a single project includes that project even if it is archived.
        with_parents=project_id is None,
        name=request.query("name"),
        description=request.query("description"),
        users=request.queries("users"),
        user_ids=request.query_ints("userIds"),
        states=stored_states(request.query_choices("states", bindings.experimentv1State)),
        labels=request.queries("labels"),
        ids=request.query_ints("experimentIdFilter.incl"),
        not_ids=request.query_ints("experimentIdFilter.notIn"),
        above=above if at_least is None else at_least - 1,
        below=below if at_most is None else at_most + 1,
        project_id=project_id,
    )
    sort_by = request.query_choice("sortBy", bindings.v1GetExperimentsRequestSortBy)

    def read(connection: Connection) -> tuple[Page, list[listings.ListedExperiment]]:
        if project_id is not None:
            projects.require(connection, project_id)
        page = request.page_of(listings.count_experiments(connection, wanted))
        rows = listings.list_experiments(
            connection,
            wanted,
            sort_by=sort_by,
            is_descending=request.is_descending,
            offset=page.start,
            limit=page.end - page.start,
        )
        return page, rows

    page, rows = await request.services.read(read)
    return {
        "experiments": await _experiments_json(request.services, rows),
        "pagination": page.to_json(),
    }


async def show_experiment(request: ApiRequest) -> dict[str, Any]:
    found = await shown_experiment(request.services, request.path_params["experiment_id"])
    state = "STATE_SCHEDULED" if found["state"] in ("STATE_RUNNING", "STATE_STARTING") else "STATE_QUEUED"
    job = message(bindings.v1JobSummary, jobsAhead=0, state=state)
    is_open = found["endTime"] is None
    return message(
        bindings.v1GetExperimentResponse,
        experiment=found,
        config=found["config"],
        jobSummary=job if is_open else None,
    )


def _resumed_run(connection: Connection, experiment_id: int) -> SavedRun | None:
    """Return the checkpoint from which an experiment's only trial would resume.

    None if the trial has no checkpoint, or if the experiment does not have exactly one trial.
    """
    trials = trial_rows.of_experiment(connection, experiment_id)
    return resume.of_trial(connection, trials[0]) if len(trials) == 1 else None


def _reject_project_change(connection: Connection, project_id: int, changes: Mapping[str, Any]) -> None:
    row = projects.require(connection, project_id)
    for key, there in (("workspace", row.workspace_name), ("project", row.name)):
        if changes.get(key) not in (None, "", there):
            raise RequestError(
                400,
                f"{key} of the changed config is {shown(changes[key])}; expected {there!r}, where the experiment is. "
                "Leave it out, and use `det experiment move`.",
            )


def _prepare_continued(
    services: Services, experiment_id: int, override: str
) -> tuple[Submission | None, bool]:
    """Validate a request to continue an experiment with the YAML changes ``override``.

    Returns (submission, whether ``override`` changes anything). The submission is None for a detached experiment.
    """
    with services.database.read() as connection:
        row = experiment_rows.require(connection, experiment_id)
        changes = read_override(override)
        if row.unmanaged:
            return None, bool(changes)
        _reject_project_change(connection, row.project_id, changes)
        active = json.loads(row.config)
        config = _unmask_secrets(continued_config(active, changes), None, row)
        tgz = experiment_rows.model_definition(connection, experiment_id)
        resumed = _resumed_run(connection, experiment_id)
    return validated_submission(services, config, tgz, resumed, active=active), bool(changes)


async def continue_experiment(request: ApiRequest) -> dict[str, Any]:
    body, services = request.body(), request.services
    experiment_id, override = body.required_integer("id"), body.text("overrideConfig") or ""
    submission, has_changes = await services.check(
        lambda: _prepare_continued(services, experiment_id, override)
    )
    changed = submission if has_changes else None
    if changed is not None:
        wanted = request_of_config(changed.config, services.backend.nodes(), may_wait=True)
        await refuse_unsatisfiable(services, wanted, Diagnostics({}, LABEL))
    await services.write(lambda tx: experiments.continue_(tx, experiment_id, changed))
    warnings = ["LAUNCH_WARNING_CURRENT_SLOTS_EXCEEDED"] if submission and submission.exceeds_slots else []
    return message(
        bindings.v1ContinueExperimentResponse,
        experiment=await shown_experiment(services, experiment_id),
        warnings=warnings,
    )


# Key of ``checkpoint_storage`` -> the same field of the request.
_POLICY = {
    "save_experiment_best": "saveExperimentBest",
    "save_trial_best": "saveTrialBest",
    "save_trial_latest": "saveTrialLatest",
}


async def patch_experiment(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    resources = body.fields("resources") or Fields({})
    storage = body.fields("checkpointStorage") or Fields({})
    policy = {ours: storage.integer(theirs, 0, 10**9) for ours, theirs in _POLICY.items()}
    given = {
        **{name: body.text(name) for name in ("name", "description", "notes")},
        "labels": body.texts("labels"),
        "priority": resources.integer("priority", 1, 99),
        "weight": resources.number("weight"),
        "checkpoint_storage": {key: number for key, number in policy.items() if number is not None} or None,
    }
    fields: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if "maxSlots" in resources:
        fields["max_slots"] = resources.integer("maxSlots", 0, 10**6)
    if not fields.get("name", "x").strip():
        raise body.wrong("name", "a text")
    if not 0 < fields.get("weight", 1) < 1e9:
        raise resources.wrong("weight", "a number above 0")
    experiment_id = request.path_params["experiment_id"]
    await request.services.write(lambda tx: experiments.patch(tx, experiment_id, **fields))
    return {"experiment": await shown_experiment(request.services, experiment_id)}


@writes
def change_label(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    """Add (PUT) or remove (DELETE) a label; return the experiment's labels."""
    experiment_id, label = request.path_params["experiment_id"], request.path_params["label"]
    labels = set(json.loads(experiment_rows.require(tx.connection, experiment_id).labels)) - {label}
    if request.route.method == "PUT":
        labels.add(label)
    experiments.patch(tx, experiment_id, labels=sorted(labels))
    return {"labels": sorted(labels)}


@reads
def show_model_definition(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    tgz = experiment_rows.model_definition(connection, request.path_params["experiment_id"])
    return message(bindings.v1GetModelDefResponse, b64Tgz=base64.b64encode(tgz).decode())


@reads
def best_searcher_validation_metric(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    row = experiment_rows.require(connection, request.path_params["experiment_id"])
    if row.best_metric is None:
        raise RequestError(404, f"experiment {row.id} has no validation yet.")
    return {"metric": row.best_metric}


@writes
def move(tx: Transaction, request: ApiRequest) -> None:
    target = request.body().required_integer("destinationProjectId")
    experiments.move(tx, request.path_params["experiment_id"], target)


@writes
def retain_logs(tx: Transaction, request: ApiRequest) -> None:
    days = request.body().required_integer("numDays", -1, MAX_LOG_DAYS)
    experiments.patch(tx, request.path_params["experiment_id"], log_retention_days=days)


def _handler_of(action: Action, *, needs_owner: bool = False) -> Handler:
    @writes
    def handle(tx: Transaction, request: ApiRequest) -> None:
        experiment_id = request.path_params["experiment_id"]
        row = experiment_rows.require(tx.connection, experiment_id)
        if needs_owner:
            require_owner(request.user, row.owner_id, f"experiment {experiment_id}")
        action(tx, experiment_id)

    return handle


async def preview_search(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    config = body.mapping("config")
    if config is None:
        raise body.wrong("config", "an experiment config")
    summary = await request.services.check(lambda: preview(search_section(config)))
    return message(
        bindings.v1PreviewHPSearchResponse,
        summary=message(
            bindings.v1SearchSummary,
            config=masked(summary.config, request.services.secret_names),
            trials=[_previewed_trials_json(trials) for trials in summary.trials],
        ),
    )


def _previewed_trials_json(trials: PreviewedTrials) -> dict[str, Any]:
    unit = message(
        bindings.v1SearchUnit, maxLength=trials.value is None, name=trials.unit, value=trials.value
    )
    return message(bindings.v1TrialSummary, count=trials.count, unit=unit)


_ACTIONS: dict[str, Action] = {
    "pause": experiments.pause,
    "activate": experiments.activate,
    "cancel": experiments.cancel,
    "kill": experiments.kill,
    "archive": experiments.archive,
    "unarchive": experiments.unarchive,
}
_ONE = "/experiments/{experiment_id:int}"
routes = [
    route("POST", "/experiments", create_experiment, access=USER, max_body_bytes=_MAX_SUBMISSION_BYTES),
    route("GET", "/experiments", list_experiments, access=USER),
    route("POST", "/experiments/continue", continue_experiment, access=USER),
    route("GET", _ONE, show_experiment, access=TRIAL),
    route("PATCH", _ONE, patch_experiment, access=USER),
    route("PUT", f"{_ONE}/labels/{{label}}", change_label, access=USER),
    route("DELETE", f"{_ONE}/labels/{{label}}", change_label, access=USER),
    route("GET", f"{_ONE}/model_def", show_model_definition, access=TRIAL),
    route(
        "GET",
        f"{_ONE}/searcher/best_searcher_validation_metric",
        best_searcher_validation_metric,
        access=TRIAL,
    ),
    *(route("POST", f"{_ONE}/{verb}", _handler_of(action), access=USER) for verb, action in _ACTIONS.items()),
    route("POST", f"{_ONE}/move", move, access=USER),
    route("PUT", f"{_ONE}/retain_logs", retain_logs, access=USER),
    route("DELETE", _ONE, _handler_of(experiments.delete, needs_owner=True), access=USER),
    route(
        "DELETE",
        f"{_ONE}/tensorboard-files",
        _handler_of(experiments.delete_tensorboard_files, needs_owner=True),
        access=USER,
    ),
    route("POST", "/preview-hp-search", preview_search, access=USER),
]
