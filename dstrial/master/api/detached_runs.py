"""Routes for detached (unmanaged) runs, which users' ``core_v2`` scripts report.

Source: Determined 0.38.1, ``determined/experimental/core_v2`` and ``determined/core/_log_shipper.py``.
"""

from __future__ import annotations

import re
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.api.experiments import create_detached
from dstrial.master.api.trials import read_trial_json, require_trial_of_task
from dstrial.master.clock import now_us
from dstrial.master.http.fields import Fields
from dstrial.master.http.responses import message
from dstrial.master.http.router import TRIAL, USER, ApiRequest, route, writes
from dstrial.master.lifecycle import detached_runs
from dstrial.master.store.database import Transaction
from dstrial.master.store.reports import logs
from dstrial.master.webhooks import events

_MAX_EXTERNAL_ID = 1024  # characters of an id that a script chose
_RANK = re.compile(r"[0-9]{1,9}")


def _external_id(text: str | None) -> str:
    if not text or len(text) > _MAX_EXTERNAL_ID:
        raise RequestError(
            400,
            f"the external id is empty or longer than {_MAX_EXTERNAL_ID} characters; expected a name. Choose another.",
        )
    return text


async def put_experiment(request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    inner = body.fields("createExperimentRequest") or body
    return await create_detached(request, inner, _external_id(request.path_params["external_id"]))


@writes
def create_trial(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    return message(bindings.v1CreateTrialResponse, trial=_created(tx, request, request.body(), None))


@writes
def put_trial(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    body = request.body()
    inner = body.fields("createTrialRequest")
    if inner is None:
        raise body.wrong("createTrialRequest", "an object")
    external_id = _external_id(body.text("externalTrialId"))
    return message(bindings.v1PutTrialResponse, trial=_created(tx, request, inner, external_id))


def _created(tx: Transaction, request: ApiRequest, body: Fields, external_id: str | None) -> dict[str, Any]:
    experiment_id, hparams = body.required_integer("experimentId"), body.mapping("hparams")
    trial_id = detached_runs.create_trial(tx, experiment_id, hparams, external_id)
    return read_trial_json(tx.connection, request, trial_id)


@writes
def start_trial(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    resumes = request.body().flag("resume") is not False
    point = detached_runs.start(tx, request.path_params["trial_id"], resumes=resumes)
    return message(
        bindings.v1StartTrialResponse,
        trialRunId=point.run_id,
        latestCheckpoint=point.checkpoint_uuid,
        stepsCompleted=point.steps,
    )


@writes
def patch_trial(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    """Record a detached run's state, or its heartbeat if the request has no state."""
    trial_id = request.path_params["trial_id"]
    state = request.body().choice("state", bindings.trialv1State)
    detached_runs.set_state(tx, trial_id, None if state is None else state.removeprefix("STATE_"))
    return message(bindings.v1PatchTrialResponse, trial=read_trial_json(tx.connection, request, trial_id))


async def add_logs(request: ApiRequest) -> dict[str, Any]:
    """Store log lines of a detached run, with the time of arrival as timestamp.

    The timestamp that the client sends is ignored: it is the script's start time for every line.
    """
    records = request.json() or []
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise RequestError(
            400,
            "the request's body is not a list of lines; expected objects with task_id and log. Send these.",
        )
    by_task: dict[str, list[logs.LogLine]] = {}
    for record in records:
        fields = Fields(record, "lines[]")
        by_task.setdefault(fields.required_text("taskId"), []).append(_line(fields))
    for task_id in by_task:
        request.require_task(task_id)

    find = request.services.log_triggers.find
    told = await request.services.run(
        lambda: {task_id: find(line.text for line in lines) for task_id, lines in by_task.items()}
    )

    def perform(tx: Transaction) -> None:
        for task_id, lines in by_task.items():
            trial = require_trial_of_task(tx.connection, task_id)
            logs.add_task_logs(tx, task_id, trial.id, None, lines)
            events.notify_lines(tx, task_id, told[task_id])
            detached_runs.note_heartbeat(tx, trial)

    await request.services.write(perform)
    return {}


def _line(fields: Fields) -> logs.LogLine:
    rank = fields.text("rank") or ""
    text = fields.text("log") or ""
    level, colon, rest = text.partition(": ")
    if not colon or level not in logs.LEVELS:
        level, rest = "", text
    return logs.LogLine(
        now_us(),
        fields.text("stdtype"),
        level or None,
        int(rank) if _RANK.fullmatch(rank) else None,
        rest if rest.endswith("\n") else f"{rest}\n",
    )


_ONE = "/trials/{trial_id:int}"
routes = [
    route("PUT", "/experiments/by-external-id/{external_id}", put_experiment, access=USER),
    route("POST", "/trials", create_trial, access=USER),
    route("PUT", "/trials", put_trial, access=USER),
    route("POST", f"{_ONE}/start", start_trial, access=USER),
    route("PATCH", _ONE, patch_trial, access=USER),
    route("POST", "//task-logs", add_logs, access=TRIAL),
]
