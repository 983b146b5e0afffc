"""predict: properties of the search on a formula, and what it does when things fail."""

from __future__ import annotations

import dataclasses
import json

import pytest
from surfaces import DEVICE_BYTES, Played, assert_is_lawful, play, space, surface

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import MethodOptions, measures
from dstrial.dsat.predictor.config_groups import ConfigGroups, positions
from dstrial.dsat.predictor.hardware import DEVICES, METRIC_PREFIX, nominal_machine
from dstrial.dsat.predictor.plan import headline, make_plan, parse_bytes
from dstrial.dsat.predictor.predictor import structure_of
from dstrial.dsat.predictor.profiles import ModelInfo, PredictInputs, closed_form
from dstrial.dsat.space.filters import Filters, needs_no_less_memory

pytestmark = pytest.mark.timeout(300)  # the longest of the quick tests, so that its file comes first

INFO = ModelInfo(1.3e9, 1.3e9, 1.1e9, None)


def inputs(capacity_bytes: float = DEVICE_BYTES) -> PredictInputs:
    """What dry runs might say of the surface's model."""
    groups = ConfigGroups(space())
    runs = {
        key: closed_form(
            INFO, groups.setup(structure), flops_per_record=8e12, is_accumulating=is_accumulating
        )
        for key, (structure, is_accumulating) in groups.representatives().items()
    }
    return PredictInputs(runs, {}, nominal_machine(DEVICES["a100"], 8), capacity_bytes, False, "fake tensors")


@pytest.mark.parametrize(("num_parallel", "max_trials"), [(1, 1), (1, 4), (2, 7), (3, 2)])
def test_a_search_measures_own_first_nothing_twice_nothing_illegal_and_keeps_its_limits(
    num_parallel: int, max_trials: int
) -> None:
    searched = space()

    played = play("predict", searched, num_parallel=num_parallel, max_trials=max_trials)

    assert_is_lawful(played, searched, num_parallel=num_parallel, max_trials=max_trials)


def test_it_comes_within_three_percent_in_a_few_trials_and_never_runs_out_of_memory() -> None:
    exhaustive = max(
        outcome.metrics["throughput"]
        for structure in (
            *ConfigGroups(space()).bases(),
            *ConfigGroups(space()).neighbours(ConfigGroups(space()).own, 1.3e9),
        )
        for position in positions(space())
        if isinstance(outcome := surface(space().candidate(structure, position)), Measured)
    )

    played = play("predict", max_trials=64)

    rates = [
        outcome.metrics["throughput"] if isinstance(outcome, Measured) else 0.0
        for _, outcome in played.outcomes.values()
    ]
    assert max(rates[:6]) > 0.97 * exhaustive
    assert max(rates) > 0.99 * exhaustive
    assert played.oom_share == 0
    assert len(rates) < 20


@pytest.fixture(scope="module")
def five_trials() -> Played:
    """A search of five trials, played once."""
    return play("predict", max_trials=5)


def test_a_search_restored_before_every_result_asks_for_the_same(five_trials: Played) -> None:
    again = play("predict", max_trials=5, restart=True)

    assert five_trials.actions == again.actions
    assert five_trials.last_snapshot == again.last_snapshot


def test_what_was_predicted_of_a_trial_is_kept_with_where_its_time_goes() -> None:
    searched = space()
    method = search_method("predict", searched, MethodOptions("throughput"), Filters(searched), inputs())
    (own,) = measures(method.start())
    method.on_result(own.trial_id, surface(own.candidate))

    snapshot = json.loads(json.dumps(method.snapshot()))

    assert set(snapshot["forecasts"]) == {"1", "2"}
    second = snapshot["forecasts"]["2"]
    assert sum(second["parts"].values()) == pytest.approx(second["median_s"])
    assert second["memory_phase"] in ("forward", "backward", "step")
    assert snapshot["left"][0]["gain"] > 0.01


def test_where_the_time_of_the_own_configuration_goes_is_told_after_the_machine_was_measured_not_before() -> (
    None
):
    searched = space()
    given = dataclasses.replace(inputs(), machine=None)
    method = search_method("predict", searched, MethodOptions("throughput"), Filters(searched), given)
    (own,) = measures(method.start())
    guessed = method.snapshot()
    measured = surface(own.candidate)
    assert isinstance(measured, Measured)
    speeds = {"flops_per_s": 1e14, "operation_s": 5e-6, "copy_bytes_per_s": 1e12}
    machine = {METRIC_PREFIX + name: value for name, value in speeds.items()}
    method.on_result(own.trial_id, Measured({**measured.metrics, **machine}))

    snapshot = method.snapshot()

    assert guessed["forecasts"]["1"]["is_guess"]
    assert not guessed["explained"]
    assert not snapshot["forecasts"]["2"]["is_guess"]
    parts = snapshot["explained"]["1"]
    assert parts != guessed["forecasts"]["1"]["parts"]
    assert sum(parts.values()) == pytest.approx(measured.metrics["latency"] / 1e6, rel=0.05)


def test_where_nothing_can_be_better_the_users_own_configuration_is_enough() -> None:
    def flat(candidate: Candidate) -> Outcome:
        found = surface(candidate)
        if isinstance(found, Failure) or candidate.is_own:
            return found
        return Measured({**found.metrics, "throughput": 300.0, "latency": 256 / 300 * 1e6})

    played = play("predict", space(stages=(1, 2)), outcome_of=flat)

    assert len(played.measured) < 25
    assert "nothing left" in played.finish.reason


def test_own_configuration_out_of_memory_is_followed_by_what_is_predicted_to_fit() -> None:
    def small_device(candidate: Candidate) -> Outcome:
        if candidate.is_own:
            return Failure(FailureKind.DEVICE_OOM, "out of memory", "backward", 10**9, int(13e9))
        return surface(candidate)

    searched = space()
    method = search_method("predict", searched, MethodOptions("throughput"), Filters(searched), inputs(14e9))
    (own,) = measures(method.start())
    (second,) = measures(method.on_result(own.trial_id, small_device(own.candidate)))

    assert second.why == "predicted to fit"
    needs = method.snapshot()["margins"]
    assert [need["micro_batch_size"] for need in needs] == [4, 8, 16]
    assert 0 < needs[0]["missing_bytes"] < needs[1]["missing_bytes"] < needs[2]["missing_bytes"]
    assert {need["trial_id"] for need in needs} == {own.trial_id}
    plain = play("predict", outcome_of=small_device, max_trials=4)
    assert plain.measured[1].candidate == searched.smallest()
    assert not plain.finish.is_failure


def test_nothing_is_tried_that_needs_no_less_than_what_ran_out_of_memory() -> None:
    def small_device(candidate: Candidate) -> Outcome:
        if candidate.batch.micro_batch_size > 4:
            return Failure(FailureKind.DEVICE_OOM, "out of memory", "backward", 10**9, int(DEVICE_BYTES))
        return surface(candidate)

    searched = space()
    played = play("predict", searched, outcome_of=small_device, max_trials=14)

    failed: list[Candidate] = []
    for measure, outcome in played.outcomes.values():
        assert not any(needs_no_less_memory(measure.candidate, one, searched) for one in failed)
        if isinstance(outcome, Failure):
            failed.append(measure.candidate)
    groups = [ConfigGroups(searched).setup(structure_of(one)).group for one in failed]
    assert all(groups.count(group) <= 2 for group in groups)


@pytest.fixture(scope="module")
def without_stage_3() -> Played:
    """A search whose third stage is refused, played once."""

    def refuses(candidate: Candidate) -> Outcome:
        if candidate.stage == 3:
            return Failure(FailureKind.BAD_CONFIG, "no stage 3 today", "init")
        return surface(candidate)

    return play("predict", outcome_of=refuses, max_trials=30)


def test_a_group_that_refuses_is_left_alone_and_knobs_are_changed_many_at_once(
    without_stage_3: Played,
) -> None:
    groups = ConfigGroups(space())

    refused = [one.candidate for one in without_stage_3.measured if one.candidate.stage == 3]
    tried = {groups.group(structure_of(one)) for one in refused}
    assert 0 < len(refused) <= 2 * len(tried)
    second = structure_of(without_stage_3.measured[1].candidate)
    assert len(groups.changed(second)) >= 2


def test_a_refused_structure_is_not_tried_with_other_micro_batches(without_stage_3: Played) -> None:
    tried = [(one.candidate.stage, one.candidate.settings) for one in without_stage_3.measured]
    refused = [one for one in tried if one[0] == 3]
    assert len(refused) == len(set(refused)) > 0


def test_lost_ranks_are_given_one_more_chance() -> None:
    def lost(candidate: Candidate) -> Outcome:
        return surface(candidate) if candidate.is_own else Failure(FailureKind.COMMUNICATION, "peer lost")

    played = play("predict", outcome_of=lost, max_trials=5)

    second, third = (one.candidate for one in played.measured[1:3])
    assert second == third
    assert played.measured[3].candidate != second


def test_inputs_survive_json() -> None:
    given_inputs = inputs()

    assert PredictInputs.from_json(json.loads(json.dumps(given_inputs.to_json()))) == given_inputs


def test_a_measurement_is_awaited_for_as_long_as_it_is_predicted_to_take(five_trials: Played) -> None:
    first, second = five_trials.measured[:2]
    assert first.predicted_s is None
    assert second.predicted_s is not None
    assert 30 < second.predicted_s < 300


# ---- plan -------------------------------------------------------------------------------------


def test_a_plan_says_what_fits_what_lacks_how_much_and_what_is_fastest() -> None:
    roomy, tight = make_plan(space(stages=(0, 1, 2, 3)), inputs(80e9)), make_plan(space(), inputs(3e9))

    assert roomy.rows[0].fits
    assert all(row.margin_bytes >= 0 for row in roomy.rows if row.fits)
    assert [row.throughput for row in roomy.best] == sorted(
        (row.throughput for row in roomy.best), reverse=True
    )
    assert roomy.best[0].throughput_low < roomy.best[0].throughput < roomy.best[0].throughput_high
    assert not any(row.fits for row in tight.rows)
    assert tight.best == ()
    assert all(row.margin_bytes < 0 for row in tight.rows)
    assert "do not fit on 8 x a100" in headline(tight, 8, "a100", 3e9)
    assert json.loads(json.dumps(roomy.to_json()))["is_measured"] is False


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("80GiB", 80 * 2**30), ("24G", 24 * 10**9), ("512 MiB", 2**29), ("1000", 1000)]
)
def test_amounts_of_memory_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "0", "5 parsecs"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected 80GiB"):
        parse_bytes(text)
