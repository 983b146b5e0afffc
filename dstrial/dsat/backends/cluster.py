"""Run each trial of a search as a ``single`` experiment on a Determined master."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import logging
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from determined.common import api, context
from determined.common.api import bindings, errors
from determined.experimental import Determined
from determined.experimental.client import Experiment, ExperimentState, Trial

from dstrial.config.documents import yaml_text
from dstrial.context_directory import list_context
from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.trial_spec import TrialSpec
from dstrial.dsat.config import SearchConfig
from dstrial.dsat.core.outcome import (
    NOTHING_MEASURED,
    Failure,
    FailureKind,
    Outcome,
    failure_from_log,
    outcome_from_json,
)
from dstrial.errors import ConfigError, ConfigProblem, DstrialError

logger = logging.getLogger("dstrial.dsat")

_POLL_PERIOD_S = 1.0  # between two polls of the experiments
_RETRY_S = 2.0  # between two attempts to reach the master
_LOG_WAIT_AFTER_S = 15.0  # a shorter wait for slots is not logged
_NOTES_BEGIN = "Report of a search of dsat (JSON; do not edit):\n"  # first line of notes that dsat writes
_T = TypeVar("_T")
_UNAVAILABLE_STATUS = (502, 503, 504)  # HTTP status codes of a proxy whose master is unreachable
_OUTAGE_ERRORS: tuple[type[Exception], ...] = (errors.BadRequestException, OSError)
"""Exceptions that may mean an unreachable master; ``_is_outage`` decides."""
# States of experiments, and of trials that have their slots.
_WAITING_STATES = (ExperimentState.PAUSED, ExperimentState.ACTIVE, ExperimentState.QUEUED)
_RUNNING_STATES = ("RUNNING", "STATE_RUNNING")
_CANCELED_STATES = (
    ExperimentState.CANCELED,
    ExperimentState.STOPPING_CANCELED,
    ExperimentState.STOPPING_KILLED,
    ExperimentState.DELETED,
    ExperimentState.DELETING,
)


@dataclasses.dataclass(slots=True)
class _Submitted:
    experiment: Experiment
    running_since_s: float | None = None
    waits: SlotWaits = dataclasses.field(default_factory=lambda: SlotWaits())


class ClusterBackend:
    """Submits one experiment per trial, and polls the experiments about once a second.

    While the master is unreachable, the backend waits, and experiments continue. Master and login are those of the ``det``
    command (``DET_MASTER``, ``det user login``).
    """

    def __init__(
        self,
        settings: SearchConfig,
        should_stop: Callable[[], bool] = lambda: False,  # whether to stop waiting for the master
    ) -> None:
        self._settings = settings
        self._should_stop = should_stop
        self._submitted: dict[int, _Submitted] = {}
        self._ended: list[Ended] = []
        self._next_poll_s = 0.0
        self._is_outage = False
        # The experiment whose notes hold the report: the first that this process has submitted or found.
        self._report_experiment: Experiment | None = None
        try:
            self.client = Determined()
            self.session = self.client._session
            self._agents = of_pool(
                bindings.get_GetAgents(self.session).agents,
                str((settings.experiment.raw.get("resources") or {}).get("resource_pool") or ""),
            )
        except errors.UnauthenticatedException as error:
            raise DstrialError(
                f"the master does not know who asks ({error}); expected a login. Run `det user login`."
            ) from error
        except _OUTAGE_ERRORS as error:
            if not _is_outage(error):
                raise DstrialError(
                    f"the master does not list its agents ({error}); expected a list. Read its log, and check your "
                    "permissions there."
                ) from error
            raise DstrialError(
                f"no master answers ({error}); expected one to run trials. Start one with `dstrial up`, set DET_MASTER, or "
                "pass --local."
            ) from error

    @property
    def num_parallel(self) -> int:
        """Number of trials that can run at once, each on an agent of its own; at least 1.

        If no agent has enough slots for a trial, trials span several agents. Then the slots of all agents count together.
        """
        slots = self._settings.num_slots
        with_room = sum(1 for agent in self._agents if len(agent.slots or {}) >= slots)
        return max(with_room or sum(len(agent.slots or {}) for agent in self._agents) // slots, 1)

    def has_machine_for(self, num_slots: int) -> bool:
        """Return whether any single agent has at least ``num_slots`` slots."""
        return any(len(agent.slots or {}) >= num_slots for agent in self._agents)

    @property
    def has_accelerators(self) -> bool:
        slots = [slot for agent in self._agents for slot in (agent.slots or {}).values()]
        kinds = {slot.device.type for slot in slots if slot.device is not None}
        return bool(kinds - {bindings.devicev1Type.CPU, bindings.devicev1Type.UNSPECIFIED})

    def describe(self) -> str:
        return f"the master at {self.client._master}, {self._settings.num_slots} slot(s) per trial"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        if not self.adopt(spec, {}):
            try:
                experiment = self.create(spec.config, spec.label)
            except errors.APIException as error:
                if error.status_code != 400:
                    raise DstrialError(
                        f"the master refuses an experiment ({error}); expected it to run one."
                    ) from error
                self._ended.append(Ended(spec.trial_id, Failure(FailureKind.BAD_CONFIG, str(error), "check")))
                return {}
            self._add(spec, experiment)
        return {"experiment_id": self._submitted[spec.trial_id].experiment.id}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        del handle
        experiment = self.retry_until_available(lambda: self.find(spec.label))
        if experiment is not None:
            self._add(spec, experiment)
        return experiment is not None

    def _add(self, spec: TrialSpec, experiment: Experiment) -> None:
        self._submitted[spec.trial_id] = _Submitted(experiment)
        self._report_experiment = self._report_experiment or experiment

    def poll(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        if time.monotonic() < self._next_poll_s:
            return ended
        self._next_poll_s = time.monotonic() + _POLL_PERIOD_S
        for trial_id, submitted in list(self._submitted.items()):
            with self.tolerate_outage():
                outcome = _outcome_of(submitted, self._settings.num_slots)
                if outcome is not None:
                    del self._submitted[trial_id]
                    since_s = submitted.running_since_s
                    ended.append(Ended(trial_id, outcome, None if since_s is None else time.time() - since_s))
        return ended

    def running_s(self, trial_id: int) -> float:
        since_s = self._submitted[trial_id].running_since_s if trial_id in self._submitted else None
        return 0.0 if since_s is None else time.time() - since_s

    def kill(self, trial_id: int) -> None:
        submitted = self._submitted.pop(trial_id, None)
        if submitted is not None:
            self.kill_experiment(submitted.experiment)

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        """Write the report into an experiment's notes, unless a user has edited the notes.

        The experiment is that of :meth:`show_in`, else the first that this process submitted or found. Returns False if the
        master is unreachable and the caller should retry later, else True.
        """
        experiment = self._report_experiment
        if experiment is None:
            return True
        is_reachable = False
        try:
            with self.tolerate_outage():
                _set_notes(experiment, {"report": dict(report())})
                is_reachable = True
        except errors.BadRequestException as error:  # the next submitted experiment gets the report
            logger.warning("the report of the search so far cannot be published (%s)", error)
            self._report_experiment = None
            return True
        return is_reachable

    def finish(self, results: Mapping[str, str]) -> None:
        """Replace the report in the experiment's notes with the final results."""
        try:
            if self._report_experiment is not None:
                self.show_results(self._report_experiment, results)
        except errors.BadRequestException as error:
            logger.warning("the report of the search cannot be published (%s)", error)

    def show_in(self, experiment: Experiment) -> None:
        """Let :meth:`publish` write the search's report into this experiment's notes."""
        self._report_experiment = experiment

    def show_results(self, experiment: Experiment, results: Mapping[str, str]) -> None:
        """Write ``results["report.json"]`` into an experiment's notes; ignore other files."""
        kept = {name: text for name, text in results.items() if name == "report.json"}
        self.retry_until_available(lambda: _set_notes(experiment, {"results": kept}))

    def close(self) -> None:
        for trial_id in list(self._submitted):
            self.kill(trial_id)

    def create_full_experiment(self, config: Mapping[str, Any], search_id: str) -> int:
        """Submit the training of the best configuration; return the experiment's id.

        If the search has already submitted this training and it was not canceled, return the id of that experiment instead.
        """
        label = f"dsat-{search_id}-full"
        labels = [*(str(one) for one in config.get("labels") or []), label]
        found = self.retry_until_available(lambda: self.find(label))
        return int((found or self.create({**config, "labels": labels}, label)).id)

    # ---- machinery -------------------------------------------------------------------------------

    def create(
        self, config: dict[str, Any], label: str, texts: Mapping[str, str] | None = None
    ) -> Experiment:
        """Submit an experiment; create only one even if the master's response is lost.

        ``label`` must be in the config's ``labels``: a retry uses it to find an experiment that was already created. ``texts``
        are files to add to the experiment's context directory: name -> text.
        """
        before = {one.id for one in self.retry_until_available(lambda: self._labelled(label))}
        is_repeated = False

        def submit() -> Experiment:
            nonlocal is_repeated
            taken = [one for one in self._labelled(label) if one.id not in before] if is_repeated else []
            is_repeated = True
            if taken:
                return taken[0]
            files = [*self._model_definition(), *(_file(name, text) for name, text in (texts or {}).items())]
            body = bindings.v1CreateExperimentRequest(
                activate=True, config=yaml_text(config), modelDefinition=files
            )
            created = bindings.post_CreateExperiment(self.session, body=body)
            for warning in created.warnings or ():
                logger.warning(api.WARNING_MESSAGE_MAP[warning])
            return self.client.get_experiment(created.experiment.id)

        return self.retry_until_available(submit)

    def _model_definition(self) -> list[bindings.v1File]:
        """Return the files of the context directory and of ``--include``."""
        files = list_context(self._settings.context_dir).v1_files()
        includes = [Path(path) for path in self._settings.flags.include]
        # The client would print its progress into the search's table.
        with contextlib.redirect_stdout(io.StringIO()):
            included = context.read_v1_context(None, includes)
        twice = {file.path for file in files} & {file.path for file in included}
        if twice:
            problem = ConfigProblem(
                "--include", f"{min(twice)}, which the model definition has too", "other names", "Rename one."
            )
            raise ConfigError([problem])
        return [*files, *included]

    def find(self, label: str) -> Experiment | None:
        """Return the newest experiment with a label; None if it was canceled or deleted.

        None also if no experiment has the label.
        """
        newest = max(self._labelled(label), key=lambda one: int(one.id), default=None)
        return None if newest is None or newest.state in _CANCELED_STATES else newest

    def _labelled(self, label: str) -> list[Experiment]:
        return [one for one in self.client.list_experiments(labels=[label]) if label in (one.labels or ())]

    def kill_experiment(self, experiment: Experiment) -> None:
        """Kill an experiment; if the master is unreachable, only log a warning."""
        is_killed = False
        with self.tolerate_outage():
            experiment.kill()
            is_killed = True
        if not is_killed:
            logger.warning(
                "experiment %d may still have its slots, because the master does not answer: the same command goes on with "
                "it, `det experiment kill %d` ends it",
                experiment.id,
                experiment.id,
            )

    def retry_until_available(self, call: Callable[[], _T]) -> _T:
        """Return the result of ``call``, retried while the master is unreachable.

        Raises:
            KeyboardInterrupt: the constructor's ``should_stop`` returned true during an outage.
        """
        while True:
            answers: list[_T] = []
            with self.tolerate_outage():
                answers.append(call())
            if answers:
                return answers[0]
            if self._should_stop():
                raise KeyboardInterrupt
            time.sleep(_RETRY_S)

    @contextlib.contextmanager
    def tolerate_outage(self) -> Iterator[None]:
        """Suppress errors of the block that mean an unreachable master; log the first.

        Raises:
            DstrialError: the login has expired.
        """
        try:
            yield
        except errors.UnauthenticatedException as error:
            raise DstrialError(
                f"the login has expired ({error}); expected a valid one. Run `det user login`, and repeat the command."
            ) from error
        except _OUTAGE_ERRORS as error:
            if not _is_outage(error):
                raise
            if not self._is_outage:
                logger.warning(
                    "the master at %s does not answer (%s); waiting for it, trials go on meanwhile",
                    self.client._master,
                    type(error).__name__,
                )
            self._is_outage = True
        else:
            if self._is_outage:
                logger.warning("the master answers again")
            self._is_outage = False


def _is_outage(error: Exception) -> bool:
    """Return whether an exception means that the master is unreachable.

    False means that the master has rejected the request, or that the error has another cause.
    """
    # Source: ``determined.common.api._session`` 0.38.1, which also raises exceptions of ``requests``; these are OSErrors.
    if isinstance(error, errors.APIException):
        return error.status_code in _UNAVAILABLE_STATUS
    is_lost = type(error) in (errors.BadRequestException, errors.MasterNotFoundException)
    return is_lost or isinstance(error, OSError)


def _outcome_of(submitted: _Submitted, num_slots: int) -> Outcome | None:
    """Return the outcome of an experiment's trial; None if the trial has not ended.

    Also stores in ``submitted`` the time at which the trial got its slots.
    """
    experiment = submitted.experiment
    experiment.reload()
    state = experiment.state
    trials = experiment.list_trials()
    submitted.waits.log(experiment, trials, num_slots)
    if _is_running(trials):
        submitted.running_since_s = submitted.running_since_s or time.time()
    elif state in _WAITING_STATES:
        submitted.running_since_s = None
    if state in (ExperimentState.COMPLETED, ExperimentState.ERROR):
        # A reported measurement counts, even if the trial failed later.
        rows = [row.metrics for row in trials[0].iter_metrics("validation")] if trials else []
        measured = [row for row in rows if "latency" in row]
        if measured:
            numbers = {name: value for name, value in measured[-1].items() if isinstance(value, (int, float))}
            return outcome_from_json({"metrics": numbers})
    if state is ExperimentState.COMPLETED:
        return NOTHING_MEASURED
    if state is ExperimentState.ERROR:
        return failure_from_log(last_lines(trials))
    if state in (ExperimentState.CANCELED, ExperimentState.DELETED):
        return Failure(FailureKind.CANCELED, f"experiment {experiment.id} was {state.name.lower()}")
    return None


def _is_running(trials: Sequence[Trial]) -> bool:
    """Return whether an experiment's only trial exists and has its slots."""
    return bool(trials) and trials[0].state.value in _RUNNING_STATES


def last_lines(trials: Sequence[Trial]) -> list[str]:
    """Return the last 400 log lines of an experiment's only trial; [] without a trial."""
    return list(trials[0].iter_logs(tail=400)) if trials else []


class SlotWaits:
    """Logs why an experiment waits for slots, whenever the reason changes."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._logged = ""

    def log(self, experiment: Experiment, trials: Sequence[Trial], num_slots: int) -> None:
        """Log that the experiment is paused or, after 15 seconds, that it is queued.

        ``num_slots`` is the number of slots for which the experiment waits.
        """
        number, is_paused = experiment.id, experiment.state is ExperimentState.PAUSED
        if _is_running(trials) or experiment.state not in _WAITING_STATES:
            self._since_s, self._logged = time.monotonic(), ""
            return
        wait = f"experiment {number} is queued until {num_slots} slot(s) are free"
        if is_paused:
            wait = f"experiment {number} is paused; `det experiment activate {number}` lets it go on"
        if wait != self._logged and (is_paused or time.monotonic() - self._since_s > _LOG_WAIT_AFTER_S):
            logger.warning("%s", wait)
            self._logged = wait


def _file(name: str, text: str) -> bindings.v1File:
    content, now = base64.b64encode(text.encode()).decode(), str(int(time.time()))
    mode, kind = stat.S_IFREG | 0o600, ord("0")  # tar's type flag of a regular file
    return bindings.v1File(content=content, gid=0, mode=mode, mtime=now, path=name, type=kind, uid=0)


def notes_of(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as JSON below a first line that :func:`is_report` recognizes."""
    return _NOTES_BEGIN + json.dumps(fields)


def _set_notes(experiment: Experiment, fields: Mapping[str, Any]) -> None:
    """Replace an experiment's notes, unless a person has edited them."""
    experiment.reload()
    if not experiment.notes or is_report(experiment.notes):
        experiment.set_notes(notes_of(fields))


def is_report(notes: str) -> bool:
    """Return whether an experiment's notes were written by dsat, not by a person."""
    return notes.startswith(_NOTES_BEGIN)


def of_pool(agents: Sequence[bindings.v1Agent], pool: str) -> list[bindings.v1Agent]:
    """Return the agents of a resource pool; all agents if none belongs to the pool."""
    return [agent for agent in agents if pool in (agent.resourcePools or ())] or list(agents)
