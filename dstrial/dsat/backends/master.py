"""Measuring trials as ordinary ``single`` experiments of a master, through Determined's own client."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from determined.common.api import authentication, bindings, errors
from determined.experimental import Determined
from determined.experimental.client import Experiment, ExperimentState

from dstrial.dsat.backends.backend import Ended
from dstrial.dsat.outcome import Failure, FailureKind, Outcome, failure_from_log, outcome_from_json
from dstrial.dsat.settings import SearchSettings
from dstrial.dsat.trial_config import TrialSpec
from dstrial.errors import DstrialError

logger = logging.getLogger("dstrial.dsat")

_POLL_PERIOD_S = 1.0
_NUM_LOG_LINES = 400
# The exceptions of requests, which the client lets through, are OSErrors.
_AWAY = (errors.MasterNotFoundException, OSError)
_GONE = (
    ExperimentState.CANCELED,
    ExperimentState.STOPPING_CANCELED,
    ExperimentState.STOPPING_KILLED,
    ExperimentState.DELETED,
    ExperimentState.DELETING,
)
RUNS = ("RUNNING", "STATE_RUNNING")


@dataclasses.dataclass(slots=True)
class _Submitted:
    """A trial that the master has."""

    experiment: Experiment
    running_since_s: float | None = None


class MasterBackend:
    """Submits one experiment per trial, and asks for its state about once a second.

    Where the master is away, it waits for it; experiments go on meanwhile. The master and the login are those of the
    ``det`` command (``DET_MASTER``, ``det user login``).

    Args:
        settings: of the search.

    Raises:
        DstrialError: no master answers, or nobody is logged in.
    """

    keeps_deadlines = False

    def __init__(self, settings: SearchSettings) -> None:
        self._settings = settings
        self._submitted: dict[int, _Submitted] = {}
        self._ended: list[Ended] = []
        self._next_poll_s = 0.0
        self._is_away = False
        try:
            self._client = Determined()
            self._session = self._client._session
            self._agents = list(bindings.get_GetAgents(self._session).agents)
        except _AWAY as error:
            raise DstrialError(
                f"no master answers ({error}); expected one to run trials. Start one with `dstrial up`, set DET_MASTER, or "
                "pass --local."
            ) from error
        except (errors.UnauthenticatedException, errors.InvalidCredentialsException) as error:
            raise DstrialError(
                f"the master does not know who asks ({error}); expected a login. Run `det user login`."
            ) from error

    @property
    def num_parallel(self) -> int:
        """One trial for each agent that has room for it, so that no two share a machine."""
        slots = self._settings.num_slots
        with_room = sum(1 for agent in self._agents if len(agent.slots or {}) >= slots)
        return max(with_room or sum(len(agent.slots or {}) for agent in self._agents) // slots, 1)

    @property
    def num_slots(self) -> int:
        """All slots of the master."""
        return sum(len(agent.slots or {}) for agent in self._agents)

    @property
    def has_accelerators(self) -> bool:
        """Whether any slot is more than a CPU."""
        slots = [slot for agent in self._agents for slot in (agent.slots or {}).values()]
        kinds = {slot.device.type for slot in slots if slot.device is not None}
        return bool(kinds - {bindings.devicev1Type.CPU, bindings.devicev1Type.UNSPECIFIED})

    def describe(self) -> str:
        """Name the master."""
        return f"the master at {self._client._master}, {self._settings.num_slots} slot(s) per trial"

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        """Submit an experiment, unless the one of this label is there already."""
        experiment = self.find(spec.label) or self._submit(spec)
        if experiment is None:
            return {}
        self._submitted[spec.trial_id] = _Submitted(experiment)
        return {"experiment_id": experiment.id}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        """Find the experiment again, whatever its state."""
        del handle
        experiment = self.find(spec.label)
        if experiment is None:
            return False
        self._submitted[spec.trial_id] = _Submitted(experiment)
        return True

    def poll(self) -> list[Ended]:
        """Return the trials whose experiments have ended."""
        ended, self._ended = self._ended, []
        if time.monotonic() < self._next_poll_s:
            return ended
        self._next_poll_s = time.monotonic() + _POLL_PERIOD_S
        for trial_id, submitted in list(self._submitted.items()):
            with self.patient():
                outcome = self._outcome(submitted)
                if outcome is not None:
                    del self._submitted[trial_id]
                    since_s = submitted.running_since_s
                    ended.append(Ended(trial_id, outcome, None if since_s is None else time.time() - since_s))
        return ended

    def running_s(self, trial_id: int) -> float:
        """Return how long a trial has been seen running."""
        since_s = self._submitted[trial_id].running_since_s if trial_id in self._submitted else None
        return 0.0 if since_s is None else time.time() - since_s

    def kill(self, trial_id: int) -> None:
        """Kill the experiment."""
        submitted = self._submitted.pop(trial_id, None)
        if submitted is not None:
            with self.patient():
                submitted.experiment.kill()

    def finish(self, results: Mapping[str, str]) -> None:
        """Do nothing: trials that were launched one by one have ended."""

    def close(self) -> None:
        """Kill every experiment that is left."""
        for trial_id in list(self._submitted):
            self.kill(trial_id)

    def create_full_experiment(self, config: dict[str, Any]) -> int:
        """Submit an experiment that is no measurement; returns its number."""
        return int(self.create(config).id)

    # ---- machinery -------------------------------------------------------------------------------

    def _submit(self, spec: TrialSpec) -> Experiment | None:
        try:
            return self.create(spec.config)
        except errors.APIException as error:
            if error.status_code != 400:
                raise DstrialError(
                    f"the master refuses an experiment ({error}); expected it to run one."
                ) from error
            self._ended.append(Ended(spec.trial_id, Failure(FailureKind.BAD_CONFIG, str(error), "check")))
            return None

    def create(self, config: dict[str, Any]) -> Experiment:
        """Submit an experiment."""
        return self._client.create_experiment(
            config, self._settings.context_dir, includes=[Path(path) for path in self._settings.args.include]
        )

    def find(self, label: str) -> Experiment | None:
        """Return the newest experiment of a label; what was cancelled, by an interrupted search for example, does not count."""
        found = self._client.list_experiments(labels=[label])
        ours = [one for one in found if label in (one.labels or ()) and one.state not in _GONE]
        return max(ours, key=lambda one: int(one.id), default=None)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Wait for a master that is away; say so once."""
        try:
            yield
        except _AWAY as error:
            if not self._is_away:
                logger.warning(
                    "the master does not answer (%s); waiting for it, trials go on meanwhile", error
                )
            self._is_away = True
        except errors.UnauthenticatedException:
            self._session = authentication.login_with_cache(self._client._master)
        else:
            if self._is_away:
                logger.warning("the master answers again")
            self._is_away = False

    def _outcome(self, submitted: _Submitted) -> Outcome | None:
        experiment = submitted.experiment
        experiment.reload()
        state = experiment.state
        trials = experiment.list_trials()
        if submitted.running_since_s is None and trials and trials[0].state.value in RUNS:
            submitted.running_since_s = time.time()
        if state is ExperimentState.COMPLETED:
            rows = [row.metrics for row in trials[0].iter_metrics("validation")] if trials else []
            if rows and rows[-1]:
                numbers = {name: value for name, value in rows[-1].items() if isinstance(value, (int, float))}
                return outcome_from_json({"metrics": numbers})
            return Failure(FailureKind.USER_ERROR, "it ended without having measured anything")
        if state is ExperimentState.ERROR:
            lines = list(trials[0].iter_logs(tail=_NUM_LOG_LINES)) if trials else []
            return failure_from_log(lines)
        if state in (ExperimentState.CANCELED, ExperimentState.DELETED):
            return Failure(FailureKind.CANCELED, f"experiment {experiment.id} was {state.name.lower()}")
        return None
