"""Play a search without training: a function gives each trial's metric over time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.search.method import Action, Create, ExitReason, Shutdown, Stop
from dstrial.search.random_state import SearchRandom
from dstrial.search.searcher import Searcher


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedTrial:
    """What became of a trial.

    Attributes:
        request_id: the searcher's name of it.
        hparams: its hyperparameters.
        length: how long it trained, in units of the time metric.
        was_stopped: whether the searcher stopped it.
        exit_reason: why it ended early, None if it did not.
    """

    request_id: str
    hparams: dict[str, Any]
    length: int
    was_stopped: bool
    exit_reason: ExitReason | None


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationResult:
    """A search that has been played to its end.

    Attributes:
        trials: in the order of their creation.
        max_open: most trials that were open at once, besides those that were told to stop.
        shutdown: how the search ended.
        actions: everything the searcher asked for, in order.
    """

    trials: tuple[SimulatedTrial, ...]
    max_open: int
    shutdown: Shutdown
    actions: tuple[Action, ...]


def simulate(
    config: Mapping[str, Any],
    seed: int,
    metric: Callable[[dict[str, Any], int], float],
    *,
    early_exit: Callable[[dict[str, Any], int], ExitReason | None] = lambda _hparams, _time: None,
    schedule_seed: int = 0,
    restart_searcher: bool = False,
) -> SimulationResult:
    """Play a search: at each step a random open trial trains a unit and validates.

    Args:
        config: the experiment config with defaults; ``searcher.max_time`` is how long a trial trains.
        seed: the experiment's seed.
        metric: the value of ``searcher.metric`` from hyperparameters and time.
        early_exit: whether a trial ends at this time, and why.
        schedule_seed: seed of the order in which trials get on.
        restart_searcher: whether the searcher is restored from its snapshot before every event.

    Raises:
        SearchError: as from the searcher.
    """
    searcher = Searcher.new(config, seed)
    section = config["searcher"]
    max_time = int(section.get("max_time") or 1)
    time_metric = section.get("time_metric") or "batches"
    schedule = SearchRandom(schedule_seed)
    hparams: dict[str, dict[str, Any]] = {}
    time: dict[str, int] = {}
    open_trials: list[str] = []
    stopped: set[str] = set()
    reasons: dict[str, ExitReason] = {}
    history: list[Action] = []
    max_open = 0

    def take(actions: list[Action]) -> None:
        nonlocal max_open
        history.extend(actions)
        for action in actions:
            if isinstance(action, Create):
                hparams[action.request_id] = action.hparams
                time[action.request_id] = 0
                open_trials.append(action.request_id)
            elif isinstance(action, Stop):
                stopped.add(action.request_id)

    def close(request_id: str) -> None:
        open_trials.remove(request_id)
        take(searcher.trial_exited(request_id))

    take(searcher.initial_trials())
    while open_trials:
        if restart_searcher:
            searcher = Searcher.restore(config, json.loads(json.dumps(searcher.snapshot())))
        max_open = max(max_open, len([trial for trial in open_trials if trial not in stopped]))
        request_id = open_trials[schedule.integer_below(len(open_trials))]
        if request_id in stopped or time[request_id] >= max_time:
            close(request_id)
            continue
        time[request_id] += 1
        reason = early_exit(hparams[request_id], time[request_id])
        if reason is not None:
            reasons[request_id] = reason
            take(searcher.trial_exited_early(request_id, reason))
            close(request_id)
            continue
        metrics = {
            section["metric"]: metric(hparams[request_id], time[request_id]),
            time_metric: time[request_id],
        }
        take(searcher.validation_completed(request_id, metrics))
    trials = tuple(
        SimulatedTrial(key, hparams[key], time[key], key in stopped, reasons.get(key)) for key in hparams
    )
    shutdown = next(action for action in history if isinstance(action, Shutdown))
    return SimulationResult(trials, max_open, shutdown, tuple(history))
