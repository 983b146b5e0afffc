"""Read whether an experiment's trial has its slots, and how it has ended."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence

from determined.common.api import errors
from determined.experimental.client import Experiment, ExperimentState, Trial

from dstrial.dsat.core.outcome import (
    NOTHING_MEASURED,
    Failure,
    FailureKind,
    Outcome,
    failure_from_log,
    outcome_from_json,
)

logger = logging.getLogger("dstrial.dsat")

_AWAY_STATUS = (502, 503, 504)
_WAITING = (ExperimentState.PAUSED, ExperimentState.ACTIVE, ExperimentState.QUEUED)
RUNS = ("RUNNING", "STATE_RUNNING")
"""States of a trial that has its slots."""


@dataclasses.dataclass(slots=True)
class Submitted:
    """A trial that was submitted to the master."""

    experiment: Experiment
    label: str
    running_since_s: float | None = None
    told_waiting: str = ""


def is_outage(error: Exception) -> bool:
    """Return whether a client's exception means an absent master, not a refusal.

    Source: ``determined.common.api._session`` 0.38.1; exceptions of requests that it lets through are OSErrors.
    """
    if isinstance(error, errors.APIException):
        return error.status_code in _AWAY_STATUS
    is_lost = type(error) in (errors.BadRequestException, errors.MasterNotFoundException)
    return is_lost or isinstance(error, OSError)


def outage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of an absent master; :func:`is_outage` decides."""
    return (errors.BadRequestException, OSError)


def outcome_of(submitted: Submitted, num_slots: int) -> Outcome | None:
    """Ask the master how an experiment's trial has ended; None if it has not.

    ``submitted`` notes whether the trial has its slots; a change is logged.
    """
    experiment = submitted.experiment
    experiment.reload()
    state = experiment.state
    trials = experiment.list_trials()
    _note_slots(submitted, num_slots, bool(trials) and trials[0].state.value in RUNS)
    if state in (ExperimentState.COMPLETED, ExperimentState.ERROR):
        # A reported measurement counts, however its process ended.
        rows = [row.metrics for row in trials[0].iter_metrics("validation")] if trials else []
        measured = [row for row in rows if "latency" in row]
        if measured:
            numbers = {name: value for name, value in measured[-1].items() if isinstance(value, (int, float))}
            return outcome_from_json({"metrics": numbers})
    if state is ExperimentState.COMPLETED:
        return NOTHING_MEASURED
    if state is ExperimentState.ERROR:
        failure = failure_from_log(last_lines(trials))
        if failure.kind is FailureKind.NO_ROOM:
            experiment.remove_label(submitted.label)  # the retry of this trial is another experiment
        return failure
    if state in (ExperimentState.CANCELED, ExperimentState.DELETED):
        return Failure(FailureKind.CANCELED, f"experiment {experiment.id} was {state.name.lower()}")
    return None


def last_lines(trials: Sequence[Trial]) -> list[str]:
    """Return the end of the log of an experiment's only trial."""
    return list(trials[0].iter_logs(tail=400)) if trials else []


def why_waiting(experiment: Experiment, num_slots: int) -> str:
    """Say for a person why an experiment that has not ended does not run."""
    if experiment.state is ExperimentState.PAUSED:
        return (
            f"experiment {experiment.id} is paused; `det experiment activate {experiment.id}` lets it go on"
        )
    return f"experiment {experiment.id} is queued until {num_slots} slot(s) are free"


def _note_slots(submitted: Submitted, num_slots: int, is_running: bool) -> None:
    """Stop a trial's clock while others have its slots, and say why."""
    if is_running:
        if submitted.running_since_s is None:
            submitted.running_since_s = time.time()
        if submitted.told_waiting:
            logger.warning("experiment %d has its slots", submitted.experiment.id)
            submitted.told_waiting = ""
    elif submitted.experiment.state in _WAITING and (submitted.running_since_s or submitted.told_waiting):
        submitted.running_since_s = None
        why = why_waiting(submitted.experiment, num_slots)
        if why != submitted.told_waiting:
            logger.warning("%s", why)
            submitted.told_waiting = why
