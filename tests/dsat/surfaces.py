"""Plays whole searches on a formula that replaces measurements."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.parallel_dims import ParallelDims
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import (
    Failure,
    FailureKind,
    Measured,
    Outcome,
    TrialResult,
    outcome_from_json,
    outcome_to_json,
)
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import Action, ConfigSearch, Finish, Measure, MethodOptions
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.report import SearchFacts
from dstrial.dsat.space import Space
from dstrial.search.sampling import SearchRandom

BASE = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}
PARAMS = 1.3e9
DEVICE_BYTES = 40e9
ACTIVATION_BYTES = 1.1e9
CONTEXT_BYTES = 1.2e9
SIZES = ParallelDims(8)


def space(base: dict[str, Any] | None = None, **arguments: Any) -> Space:
    # A space changes only its cache of checked candidates, so all searches can share one.
    return _plain_space() if base is None and not arguments else Space(base or BASE, SIZES, **arguments)


@functools.cache
def _plain_space() -> Space:
    return Space(BASE, SIZES)


def surface(candidate: Candidate) -> Outcome:
    """Return the outcome of 1.3 B parameters in bf16 with Adam on 8 GPUs of 40 GB."""
    micro, stage = candidate.batch.micro_batch_size, candidate.stage
    bucket = dict(candidate.settings).get("zero_optimization.reduce_bucket_size", 5e8)
    state = PARAMS * {0: 16, 1: 4 + 12 / 8, 2: 2 + 14 / 8, 3: 2.0}[stage]
    peak = state + micro * ACTIVATION_BYTES + 4 * bucket + CONTEXT_BYTES
    if peak > DEVICE_BYTES:
        return Failure(FailureKind.DEVICE_OOM, "out of memory", "forward", int(ACTIVATION_BYTES))
    step_s = candidate.batch.accumulation * (0.02 + 0.011 * micro) * {0: 1, 1: 1, 2: 1.01, 3: 1.2}[stage]
    step_s += 0.05 * 5e7 / (bucket + 5e7)
    return Measured(
        {
            "throughput": candidate.batch.train_batch_size / step_s,
            "latency": step_s * 1e6,
            "FLOPS_per_gpu": candidate.batch.train_batch_size / step_s * 1e12,
            "num_params": PARAMS,
            "num_trainable_params": PARAMS,
            "activation_bytes_per_record": ACTIVATION_BYTES,
            "device_memory_bytes": DEVICE_BYTES,
            "peak_memory_bytes": peak - CONTEXT_BYTES,
        }
    )


def measures(actions: Sequence[Action]) -> list[Measure]:
    return [action for action in actions if isinstance(action, Measure)]


class Played:
    """A search that was played to its end."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.outcomes: dict[int, tuple[Measure, Outcome]] = {}
        self.max_open = 0

    @property
    def measured(self) -> list[Measure]:
        return measures(self.actions)

    @property
    def finish(self) -> Finish:
        (finish,) = [action for action in self.actions if isinstance(action, Finish)]
        return finish

    @property
    def oom_share(self) -> float:
        failed = [outcome for _, outcome in self.outcomes.values() if isinstance(outcome, Failure)]
        return len(failed) / len(self.outcomes)


def facts_of_search(**changes: Any) -> SearchFacts:
    usual: dict[str, Any] = {
        "name": "gpt <1>",
        "method": "asha",
        "metric": "throughput",
        "reason": "all trials completed",
        "is_finished": True,
        "num_slots": 8,
    }
    return SearchFacts(**{**usual, **changes})


def trials_of(played: Played, searched: Space, **fields: Any) -> list[TrialResult]:
    """Return the trials of a search, as its driver keeps them."""
    return [
        TrialResult(one.trial_id, one.candidate, searched.describe(one.candidate), one.why, outcome, **fields)
        for one, outcome in played.outcomes.values()
    ]


def play(
    name: str,
    searched: Space | None = None,
    *,
    outcome_of: Callable[[Candidate], Outcome] = surface,
    order_seed: int = 0,
    restart: bool = False,
    inputs: PredictInputs | None = None,
    **options: Any,
) -> Played:
    """Play a search method to its end.

    With ``restart`` a second instance replays every result, as a resumed search does, and must return the same actions.
    """
    searched = searched or space()
    settings = MethodOptions(**{"metric": "throughput", **options})

    def new_method() -> ConfigSearch:
        return search_method(name, searched, settings, inputs)

    method = new_method()
    resumed = new_method() if restart else None
    order = SearchRandom(order_seed)
    played = Played()
    waiting: list[Measure] = []
    actions = method.start()
    if resumed is not None:
        assert resumed.start() == actions
    while True:
        played.actions += actions
        waiting += measures(actions)
        played.max_open = max(played.max_open, len(waiting))
        if not waiting or any(isinstance(action, Finish) for action in actions):
            return played
        done = waiting.pop(order.integer_below(len(waiting)))
        outcome = outcome_of(done.candidate)
        played.outcomes[done.trial_id] = (done, outcome)
        actions = method.on_result(done.trial_id, outcome)
        if resumed is not None:
            read = outcome_from_json(json.loads(json.dumps(outcome_to_json(outcome))))
            assert resumed.on_result(done.trial_id, read) == actions
            assert resumed.forecasts == method.forecasts


def assert_search_invariants(played: Played, searched: Space, *, num_parallel: int, max_trials: int) -> None:
    """Assert: own configuration first, no repeats, legal configs, limits, no failure."""
    measured = [action.candidate for action in played.measured]
    assert measured[0] == searched.own()
    identities = {ConfigGroups(searched).identity(candidate) for candidate in measured}
    assert len(identities) == len(measured) <= max_trials
    assert played.max_open <= num_parallel
    for candidate in measured:
        checked = check_deepspeed(searched.config(candidate), SIZES)
        assert not checked.problems
        assert checked.batch is not None
        assert checked.batch.train_batch_size == BASE["train_batch_size"]
    assert not played.finish.is_failure
