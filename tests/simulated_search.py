"""Simulate a search without training: a function returns the trials' metrics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.search.method import Action, Create, ExitReason, Shutdown, Stop
from dstrial.search.sampling import SearchRandom
from dstrial.search.searcher import Searcher


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedTrial:
    """The final state of a simulated trial."""

    request_id: str
    hparams: dict[str, Any]
    length: int
    was_stopped: bool
    exit_reason: ExitReason | None


@dataclasses.dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulated search."""

    trials: tuple[SimulatedTrial, ...]
    max_open: int  # maximum number of trials open at the same time, without stopped trials
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
    """Simulate a search: repeatedly a random open trial trains one unit and validates.

    ``metric`` returns the metric for hyperparameters and time; ``early_exit`` the reason why a trial ends then, or None.
    ``schedule_seed`` determines the order in which trials train. ``restart_searcher``: restore the searcher before every event.
    """
    section = config["searcher"]
    max_time = int(section.get("max_time") or 1)
    time_metric = section.get("time_metric") or "batches"
    schedule = SearchRandom(schedule_seed)
    play = _Simulation(Searcher.new(config, seed))
    play.take(play.searcher.initial_trials())
    while play.open_trials:
        if restart_searcher:
            play.searcher = Searcher.restore(config, json.loads(json.dumps(play.searcher.snapshot())))
        play.max_open = max(
            play.max_open, len([trial for trial in play.open_trials if trial not in play.stopped])
        )
        request_id = play.open_trials[schedule.integer_below(len(play.open_trials))]
        if request_id in play.stopped or play.time[request_id] >= max_time:
            play.close(request_id)
            continue
        play.time[request_id] += 1
        hparams, time = play.hparams[request_id], play.time[request_id]
        reason = early_exit(hparams, time)
        if reason is not None:
            play.reasons[request_id] = reason
            play.take(play.searcher.trial_exited_early(request_id, reason))
            play.close(request_id)
            continue
        metrics = {section["metric"]: metric(hparams, time), time_metric: time}
        play.take(play.searcher.validation_completed(request_id, metrics))
    return play.result()


class _Simulation:
    """State of a running simulation, by request id of the trials in order of creation."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher
        self.hparams: dict[str, dict[str, Any]] = {}
        self.time: dict[str, int] = {}
        self.open_trials: list[str] = []
        self.stopped: set[str] = set()
        self.reasons: dict[str, ExitReason] = {}
        self.history: list[Action] = []
        self.max_open = 0

    def take(self, actions: list[Action]) -> None:
        self.history.extend(actions)
        for action in actions:
            if isinstance(action, Create):
                self.hparams[action.request_id] = action.hparams
                self.time[action.request_id] = 0
                self.open_trials.append(action.request_id)
            elif isinstance(action, Stop):
                self.stopped.add(action.request_id)

    def close(self, request_id: str) -> None:
        self.open_trials.remove(request_id)
        self.take(self.searcher.trial_exited(request_id))

    def result(self) -> SimulationResult:
        trials = tuple(
            SimulatedTrial(key, hparams, self.time[key], key in self.stopped, self.reasons.get(key))
            for key, hparams in self.hparams.items()
        )
        shutdown = next(action for action in self.history if isinstance(action, Shutdown))
        return SimulationResult(trials, self.max_open, shutdown, tuple(self.history))
