"""The ``predict`` method on a formula: invariants, failures and ``make_plan``."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from predicted import inputs
from surfaces import DEVICE_BYTES, Played, assert_search_invariants, measures, play, space, surface, trials_of

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome, best_of
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import MethodOptions
from dstrial.dsat.methods.random_structures import needs_no_less_memory
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions, structure_of
from dstrial.dsat.predictor.hardware import METRIC_PREFIX
from dstrial.dsat.predictor.plan import PROBABILITY, headline, make_plan, needed_memory, to_json
from dstrial.dsat.predictor.predictor import Predictor
from dstrial.dsat.space import Space

pytestmark = pytest.mark.timeout(300)  # the slowest quick file; files with long timeouts start first


def predict(searched: Space | None = None, **arguments: Any) -> Played:
    """Play ``predict`` with dry runs of the surface's model."""
    return play("predict", searched, inputs=inputs(searched=searched), **arguments)


@pytest.mark.parametrize(("num_parallel", "max_trials"), [(1, 1), (1, 4), (2, 7), (3, 2)])
def test_search_satisfies_invariants(num_parallel: int, max_trials: int) -> None:
    searched = space()

    played = predict(searched, num_parallel=num_parallel, max_trials=max_trials)

    assert_search_invariants(played, searched, num_parallel=num_parallel, max_trials=max_trials)


def test_predict_finds_near_best_without_out_of_memory() -> None:
    exhaustive = max(
        outcome.metrics["throughput"]
        for structure in (
            *ConfigGroups(space()).bases(),
            *ConfigGroups(space()).moves(ConfigGroups(space()).own, 1.3e9),
        )
        for position in positions(space())
        if isinstance(outcome := surface(space().candidate(structure, position)), Measured)
    )

    played = predict(max_trials=64)

    rates = [
        outcome.metrics["throughput"] if isinstance(outcome, Measured) else 0.0
        for _, outcome in played.outcomes.values()
    ]
    assert max(rates[:10]) > 0.97 * exhaustive
    assert max(rates) > 0.99 * exhaustive
    assert played.oom_share == 0
    assert len(rates) < 20


def test_replayed_search_requests_same_trials() -> None:
    once, again = predict(max_trials=5), predict(max_trials=5, restart=True)

    assert once.actions == again.actions
    first, second = once.measured[:2]
    assert first.predicted_s is None
    assert 30 < (second.predicted_s or 0) < 300


def test_forecasts_have_times_once_machine_is_known() -> None:
    searched = space()
    known, unknown = inputs(), dataclasses.replace(inputs(), machine=None)
    for given, has_time in ((known, True), (unknown, False)):
        method = search_method("predict", searched, MethodOptions("throughput"), given)
        (own,) = measures(method.start())
        method.on_result(own.trial_id, surface(own.candidate))

        assert set(method.forecasts) == {1, 2}
        assert (method.forecasts[1]["step_s"] is not None) is has_time
        assert method.forecasts[2]["step_s"] > 0
        assert method.forecasts[2]["memory_bytes"] > 0


def test_measured_machine_explains_own_time() -> None:
    searched = space()
    predictor = Predictor(ConfigGroups(searched), dataclasses.replace(inputs(), machine=None), "throughput")
    measured = surface(searched.own())
    assert isinstance(measured, Measured)
    speeds = {"flops_per_s": 1e14, "operation_s": 5e-6, "copy_bytes_per_s": 1e12}
    machine = {METRIC_PREFIX + name: value for name, value in speeds.items()}
    predictor.learn(searched.own(), Measured({**measured.metrics, **machine}))

    (found,) = predictor.predictions([searched.own()])

    assert predictor.machine is not None
    assert found.time.median_s == pytest.approx(measured.metrics["latency"] / 1e6, rel=0.05)


def test_flat_surface_ends_search_early() -> None:
    def flat(candidate: Candidate) -> Outcome:
        found = surface(candidate)
        if isinstance(found, Failure) or candidate.is_own:
            return found
        return Measured({**found.metrics, "throughput": 300.0, "latency": 256 / 300 * 1e6})

    played = predict(space(stages=(1, 2)), outcome_of=flat)

    assert len(played.measured) < 25
    assert "nothing left" in played.finish.reason


def test_own_out_of_memory_tries_predicted_to_fit() -> None:
    def small_device(candidate: Candidate) -> Outcome:
        if candidate.is_own:
            return Failure(FailureKind.DEVICE_OOM, "out of memory", "backward", 10**9, int(13e9))
        return surface(candidate)

    searched = space()
    method = search_method("predict", searched, MethodOptions("throughput"), inputs(14e9))
    (own,) = measures(method.start())
    (second,) = measures(method.on_result(own.trial_id, small_device(own.candidate)))

    assert second.why == "predicted to fit"
    assert not predict(outcome_of=small_device, max_trials=4).finish.is_failure


def test_candidates_above_out_of_memory_are_skipped() -> None:
    def small_device(candidate: Candidate) -> Outcome:
        if candidate.batch.micro_batch_size > 4:
            return Failure(FailureKind.DEVICE_OOM, "out of memory", "backward", 10**9, int(DEVICE_BYTES))
        return surface(candidate)

    searched = space()
    played = predict(searched, outcome_of=small_device, max_trials=14)

    failed: list[Candidate] = []
    for measure, outcome in played.outcomes.values():
        assert not any(needs_no_less_memory(measure.candidate, one, searched) for one in failed)
        if isinstance(outcome, Failure):
            failed.append(measure.candidate)
    groups = [ConfigGroups(searched).setup(structure_of(one)).group for one in failed]
    assert all(groups.count(group) <= 2 for group in groups)


def test_refused_structures_and_groups_are_left_out() -> None:
    def refuses(candidate: Candidate) -> Outcome:
        if candidate.stage == 3:
            return Failure(FailureKind.BAD_CONFIG, "no stage 3 today", "init")
        return surface(candidate)

    played = predict(outcome_of=refuses, max_trials=30)

    refused = [structure_of(one.candidate) for one in played.measured if one.candidate.stage == 3]
    tried = {ConfigGroups(space()).group(structure) for structure in refused}
    assert len(set(refused)) == len(refused)
    assert 0 < len(refused) <= 2 * len(tried)


def test_lost_ranks_are_retried_once() -> None:
    def lost(candidate: Candidate) -> Outcome:
        return surface(candidate) if candidate.is_own else Failure(FailureKind.COMMUNICATION, "peer lost")

    played = predict(outcome_of=lost, max_trials=5)

    second, third = (one.candidate for one in played.measured[1:3])
    assert second == third
    assert played.measured[3].candidate != second


def test_predict_without_dry_runs_is_asha() -> None:
    blind, asha = play("predict", max_trials=6), play("asha", max_trials=6)

    assert [one.candidate for one in blind.measured] == [one.candidate for one in asha.measured]


def _noisy(deviation: float) -> Callable[[Candidate], Outcome]:
    noise = random.Random(3)

    def measure(candidate: Candidate) -> Outcome:
        found = surface(candidate)
        if isinstance(found, Failure):
            return found
        factor = math.exp(noise.gauss(0, deviation))
        latency, rate = found.metrics["latency"] * factor, found.metrics["throughput"] / factor
        half_width = 1.96 * deviation
        return Measured({**found.metrics, "latency": latency, "throughput": rate, "half_width": half_width})

    return measure


def _measured(played: Played) -> list[tuple[Candidate, Measured]]:
    return [
        (one.candidate, outcome) for one, outcome in played.outcomes.values() if isinstance(outcome, Measured)
    ]


@pytest.mark.parametrize(("deviation", "is_noisy"), [(0.01, True), (1e-5, False)])
def test_search_repeats_best_and_inseparable_ones(deviation: float, is_noisy: bool) -> None:
    usual, thorough = (predict(outcome_of=_noisy(deviation), thorough=value) for value in (False, True))

    tried = [one.candidate for one in thorough.measured]
    repeats = [one for one in thorough.measured if one.why.startswith("measured again")]
    assert len(repeats) == len(tried) - len(set(tried))
    assert (len(repeats) > 1) is is_noisy
    assert max(map(tried.count, tried)) <= 2
    assert len({one.candidate for one in usual.measured}) == len(usual.measured) - 1
    assert usual.measured[-1].why.startswith("measured again")
    assert len(thorough.measured) >= len(usual.measured) + is_noisy


@pytest.mark.parametrize("thorough", [True, False])
def test_lucky_measurement_does_not_decide_search(thorough: bool) -> None:
    rates = {one: outcome.metrics["throughput"] for one, outcome in _measured(predict(thorough=thorough))}
    lucky = max((one for one in rates if rates[one] < 0.98 * max(rates.values())), key=rates.__getitem__)
    num_lucky = 0

    def measure(candidate: Candidate) -> Outcome:
        """The first measurement of a slower configuration is 5 % too fast."""
        nonlocal num_lucky
        found, factor = surface(candidate), 1.0
        if isinstance(found, Failure):
            return found
        if candidate == lucky:
            num_lucky += 1
            factor = 1.05 if num_lucky == 1 else 1.0
        latency, rate = found.metrics["latency"] / factor, found.metrics["throughput"] * factor
        return Measured({**found.metrics, "latency": latency, "throughput": rate, "half_width": 0.01})

    best = best_of(trials_of(predict(outcome_of=measure, thorough=thorough), space()), "throughput")

    assert best is not None
    assert best.candidate != lucky


def test_failing_contender_is_measured_twice_at_most() -> None:
    seen: list[Candidate] = []
    noisy = _noisy(0.01)

    def fails_later(candidate: Candidate) -> Outcome:
        seen.append(candidate)
        is_first = seen.count(candidate) == 1
        return noisy(candidate) if is_first else Failure(FailureKind.COMMUNICATION, "peer lost")

    predict(outcome_of=fails_later, thorough=True)

    assert max(map(seen.count, seen)) == 2


def test_measured_capacity_replaces_guess() -> None:
    searched = space()
    predictor = Predictor(ConfigGroups(searched), inputs(None), "throughput")
    failure = Failure(FailureKind.DEVICE_OOM, "out of memory", "backward", 10**9, int(13e9))
    predictor.learn(searched.own(), failure)
    guessed = predictor.capacity_bytes

    predictor.learn(searched.smallest(), surface(searched.smallest()))

    assert guessed is not None
    assert guessed < DEVICE_BYTES == predictor.capacity_bytes


# ---- plan -------------------------------------------------------------------------------------


def test_plan_reports_fit_margin_and_fastest() -> None:
    roomy = make_plan(space(stages=(0, 1, 2, 3)), inputs(80e9), num_slots=8, peak_flops_per_s=312e12)
    tight = make_plan(space(), inputs(3e9), num_slots=8)

    fitting = [row for row in roomy if row.fits]
    assert roomy[: len(fitting)] == sorted(fitting, key=lambda row: -row.throughput) != []
    assert all((row.margin_bytes >= 0) is row.fits for row in (*roomy, *tight))
    assert not any(row.fits for row in tight)
    assert "do not fit on 8 x a100" in headline({8: tight}, 1.3e9, "a100")
    assert headline({4: tight, 8: roomy}, 1.3e9, "a100") == "1.3 B parameters fit on 8 x a100"
    assert 0 < (roomy[0].mfu or 0) < 0.7
    found = json.loads(json.dumps(to_json(roomy, 36_000, 2.5)))[0]
    assert found["epoch_hours"] == pytest.approx(10 / roomy[0].throughput)
    assert found["epoch_cost"] == pytest.approx(8 * 2.5 * found["epoch_hours"])
    assert not any(cell.strip() for cell in tight[0].cells(100, 2.5)[2:6])


def test_plan_and_memory_command_predict_equal_bytes() -> None:
    searched, found = space(stages=(0, 1, 2, 3)), inputs(80e9)
    groups = ConfigGroups(searched)
    plan = make_plan(searched, found, num_slots=8)

    assert plan
    for row in plan:
        structure, batch = structure_of(row.candidate), row.candidate.batch
        key = groups.run_key(structure, is_accumulating=batch.accumulation > 1)
        zero = groups.setup(structure)
        need = needed_memory(found.runs[key], zero, batch.micro_batch_size, 80e9)
        assert need.median_bytes == pytest.approx(row.memory_bytes)
        assert 80e9 - need.quantile(PROBABILITY) == pytest.approx(row.margin_bytes)
