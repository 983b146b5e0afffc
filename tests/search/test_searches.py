"""Simulated searches: properties for every seed, and single decisions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_search import SimulationResult, simulate

from dstrial.config.experiment_config.submission import search_section
from dstrial.config.schema import SEARCHERS
from dstrial.errors import SearchError
from dstrial.search import Create, ExitReason, Searcher, Shutdown, Stop, preview
from dstrial.search.halving import brackets
from dstrial.search.sampling import SearchRandom
from dstrial.search.searcher import METHODS

SPACE = {
    "lr": {"type": "log", "minval": -4, "maxval": -1, "base": 10},
    "width": {"type": "int", "minval": 1, "maxval": 64},
    "net": {"drop": {"type": "double", "minval": 0.0, "maxval": 1.0}, "kind": "cnn"},
    "act": {"type": "categorical", "vals": ["relu", "gelu"]},
}
# Searchers that replace invalid hyperparameters; the points of a grid are fixed.
REPLACING = [name for name in SEARCHERS if name != "grid"]


def config(name: str, **changes: Any) -> dict[str, Any]:
    searcher = {
        "name": name,
        "metric": "loss",
        "smaller_is_better": True,
        "max_trials": 12,
        "max_concurrent_trials": 4,
        "divisor": 3,
        "num_rungs": 3,
        "max_rungs": 3,
        "bracket_rungs": [],
        "mode": "standard",
        "max_time": 9,
        "time_metric": "epochs",
        **changes,
    }
    return {"hyperparameters": SPACE, "searcher": searcher}


def loss(hparams: dict[str, Any], time: int) -> float:
    """Return a loss whose ranking of trials is the same at all times, without ties."""
    return hparams["net"]["drop"] + 1.0 / time


configs = st.builds(
    config,
    st.sampled_from([name for name, keys in SEARCHERS.items() if "max_trials" in keys.keys]),
    max_trials=st.integers(1, 20),
    max_concurrent_trials=st.integers(0, 8),
    divisor=st.integers(2, 4),
    num_rungs=st.integers(1, 4),
    max_rungs=st.integers(1, 4),
    mode=st.sampled_from(["aggressive", "standard", "conservative"]),
    max_time=st.integers(1, 20),
)
seeds = st.integers(0, 2**32 - 1)


def play(search: dict[str, Any], seed: int, **options: Any) -> SimulationResult:
    return simulate(search, seed, loss, schedule_seed=seed // 2, **options)


def num_brackets(search: dict[str, Any]) -> int:
    return len(brackets(search["searcher"])) if search["searcher"]["name"] == "adaptive_asha" else 1


def concurrency(search: dict[str, Any]) -> int:
    """Return the limit of open trials; every bracket may have one open trial."""
    limit = search["searcher"]["max_concurrent_trials"] or search["searcher"]["max_trials"]
    return max(limit, num_brackets(search))


@settings(max_examples=60, deadline=None)
@given(configs, seeds)
def test_search_respects_limits_and_shuts_down_once(search: dict[str, Any], seed: int) -> None:
    result = play(search, seed)

    assert len(result.trials) <= max(search["searcher"]["max_trials"], num_brackets(search))
    assert result.max_open <= concurrency(search)
    assert all(trial.length <= search["searcher"]["max_time"] for trial in result.trials)
    assert result.actions[-1] == Shutdown()
    assert sum(isinstance(action, Shutdown) for action in result.actions) == 1
    stops = [action.request_id for action in result.actions if isinstance(action, Stop)]
    assert len(stops) == len(set(stops))


@pytest.mark.parametrize("name", METHODS)
def test_independent_searchers_ignore_metric_values(name: str) -> None:
    search = config(name)
    search["hyperparameters"] = {"net": {"drop": {"type": "double", "minval": 0, "maxval": 1, "count": 9}}}
    found = [
        [(trial.hparams, trial.length) for trial in simulate(search, 0, metric).trials]
        for metric in (loss, lambda hparams, time: -loss(hparams, time))
    ]

    assert (found[0] == found[1]) == SEARCHERS[name].is_independent


@pytest.mark.parametrize("name", ["adaptive_asha", "async_halving"])
@pytest.mark.parametrize("seed", range(3))
def test_trials_end_on_previewed_rungs(name: str, seed: int) -> None:
    search = config(name, max_trials=40)
    result, previewed = play(search, seed), preview(search).trials

    assert {trial.length for trial in result.trials} <= {trials.value for trials in previewed}
    assert len(result.trials) == sum(trials.count for trials in previewed)


@settings(max_examples=40, deadline=None)
@given(configs, seeds)
def test_best_trial_is_never_stopped_early(search: dict[str, Any], seed: int) -> None:
    result = play(search, seed)

    best = min(result.trials, key=lambda trial: trial.hparams["net"]["drop"])
    assert best.length == search["searcher"]["max_time"]


@settings(max_examples=30, deadline=None)
@given(configs, seeds)
def test_search_restored_before_each_event_is_unchanged(search: dict[str, Any], seed: int) -> None:
    def sometimes(hparams: dict[str, Any], time: int) -> ExitReason | None:
        reasons = [None, *ExitReason]
        return reasons[hparams["width"] % 4] if time == 2 else None

    undisturbed = play(search, seed, early_exit=sometimes)

    assert play(search, seed, early_exit=sometimes, restart_searcher=True) == undisturbed


@settings(max_examples=30, deadline=None)
@given(configs, seeds)
def test_trials_with_invalid_hyperparameters_are_replaced(search: dict[str, Any], seed: int) -> None:
    def reject_gelu(hparams: dict[str, Any], _time: int) -> ExitReason | None:
        return ExitReason.INVALID_HP if hparams["act"] == "gelu" else None

    result = play(search, seed, early_exit=reject_gelu)

    valid = [trial for trial in result.trials if trial.exit_reason is None]
    assert len(valid) == len(play(search, seed).trials)
    assert not result.shutdown.failure


@settings(max_examples=30, deadline=None)
@given(configs, seeds)
def test_search_with_only_failed_trials_fails(search: dict[str, Any], seed: int) -> None:
    result = play(search, seed, early_exit=lambda _hparams, _time: ExitReason.ERRORED)

    assert result.shutdown == Shutdown(failure=True)
    assert len(result.trials) == len(play(search, seed).trials)


@pytest.mark.parametrize("name", REPLACING)
def test_constant_invalid_hyperparameters_are_not_retried(name: str) -> None:
    search = config(name, max_trials=1)
    search["hyperparameters"] = {"lr": {"type": "const", "val": 0.1}, "net": {"kind": "cnn"}}

    result = play(search, 0, early_exit=lambda _hparams, _time: ExitReason.INVALID_HP)

    assert len(result.trials) == 1


@pytest.mark.parametrize("name", REPLACING)
def test_search_with_only_invalid_hyperparameters_ends(name: str) -> None:
    result = play(
        config(name, max_trials=2, max_rungs=1),
        0,
        early_exit=lambda _hparams, _time: ExitReason.INVALID_HP,
    )

    assert len(result.trials) == 100 + (1 if name == "single" else 2)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_async_halving_matches_reference_implementation(data: st.DataObject) -> None:
    """The test implements the rule a second time; reports skip rungs, tie and fail."""
    num_rungs, divisor = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1.5, 2, 3, 4]))
    max_trials, smaller_is_better = data.draw(st.integers(1, 12)), data.draw(st.booleans())
    search = config(
        "async_halving",
        num_rungs=num_rungs,
        divisor=divisor,
        max_trials=max_trials,
        smaller_is_better=smaller_is_better,
    )
    units = [max(int(9 / divisor ** (num_rungs - 1 - rung)), 1) for rung in range(num_rungs)]
    values: list[list[float]] = [[] for _ in units]
    rung_of: dict[str, int] = {}
    searcher = Searcher.new(search, data.draw(seeds))
    running = [action.request_id for action in searcher.initial_trials()]
    num_created = len(running)
    assert num_created == min(4, max_trials)
    while running:
        trial = data.draw(st.sampled_from(running))
        is_error = data.draw(st.integers(0, 9)) == 0
        stops = is_error
        if is_error:
            values[rung_of.get(trial, 0)].append(float("inf"))
            actions = searcher.trial_exited_early(trial, ExitReason.ERRORED)
        else:
            time = data.draw(st.floats(0, 12) | st.sampled_from(units))
            value = data.draw(st.integers(-3, 3))
            signed = value if smaller_is_better else -value
            actions = searcher.validation_completed(trial, {"loss": value, "epochs": time})
            for rung in range(rung_of.get(trial, 0), num_rungs):
                rung_of[trial] = rung
                if int(time) < units[rung]:
                    break
                num_better = sum(other < signed for other in values[rung])
                values[rung].append(signed)
                keep = max(int(len(values[rung]) / divisor), 1)
                if rung == num_rungs - 1 or num_better >= keep:
                    stops = True
                    break
            else:
                pytest.fail("the top rung must stop")
        expected: list[type] = [Stop] if stops and not is_error else []
        if stops:
            running.remove(trial)
            if num_created < max_trials:
                num_created += 1
                expected.append(Create)
        assert [type(action) for action in actions] == expected
        running += [action.request_id for action in actions if isinstance(action, Create)]
        if stops:
            is_last = not running
            assert [type(action) for action in searcher.trial_exited(trial)] == [Shutdown] * is_last
        elif data.draw(st.integers(0, 9)) == 0:
            running.remove(trial)
            assert [type(action) for action in searcher.trial_exited(trial)] == [Shutdown] * (not running)


def test_report_after_stop_has_no_effect() -> None:
    searcher = Searcher.new(config("async_halving", max_trials=3, max_concurrent_trials=2, num_rungs=1), 0)
    first, _ = (action.request_id for action in searcher.initial_trials())

    actions = searcher.validation_completed(first, {"loss": 1.0, "epochs": 9})

    assert [type(action) for action in actions] == [Stop, Create]
    assert searcher.validation_completed(first, {}) == []


def test_missing_metric_error_lists_reported_metrics() -> None:
    searcher = Searcher.new(config("adaptive_asha"), 0)
    request_id = searcher.initial_trials()[0].request_id

    with pytest.raises(SearchError, match=r"'loss' is missing.*reported: accuracy, epochs"):
        searcher.validation_completed(request_id, {"accuracy": 1.0, "epochs": 1})
    with pytest.raises(SearchError, match="'epochs' is 'one'; expected a number"):
        searcher.validation_completed(request_id, {"loss": 1.0, "epochs": "one"})


def test_grid_visits_each_point_once_last_first() -> None:
    search = config("grid", max_concurrent_trials=2)
    search["hyperparameters"] = {
        "b": {"type": "int", "minval": 0, "maxval": 10, "count": 3},
        "a": {"type": "categorical", "vals": ["x", "y"]},
        "n": {"c": {"type": "log", "minval": -2, "maxval": 0, "base": 10, "count": 2}},
    }

    result = play_grid(search)

    points = [(trial.hparams["a"], trial.hparams["b"], trial.hparams["n"]["c"]) for trial in result.trials]
    assert points[0] == ("y", 10, 1.0)
    assert sorted(points) == [(a, b, c) for a in "xy" for b in (0, 5, 10) for c in (0.01, 1.0)]
    assert result.max_open == 2


def test_huge_grid_is_counted_lazily() -> None:
    search = config("grid", max_concurrent_trials=1)
    axis = {"type": "int", "minval": 0, "maxval": 10**9, "count": 10**9}
    search["hyperparameters"] = {"a": axis, "b": axis, "c": {"type": "categorical", "vals": ["x", "y"]}}

    assert preview(search).trials[0].count == 2 * 10**18
    first = Searcher.new(search, 0).initial_trials()[0]
    assert isinstance(first, Create)
    assert first.hparams == {"a": 10**9, "b": 10**9, "c": "y"}


def play_grid(search: dict[str, Any]) -> SimulationResult:
    return simulate(search, 0, lambda _hparams, _time: 0.0)


@pytest.mark.parametrize(
    ("low", "high", "count", "points"),
    [(0, 1, 5, [0, 1]), (0, 5, 1, [3]), (-5, 0, 1, [-3]), (0, 9, 4, [0, 3, 6, 9]), (0, 5, 3, [0, 3, 5])],
)
def test_grid_integers_round_half_away_from_zero(low: int, high: int, count: int, points: list[int]) -> None:
    search = config("grid", max_concurrent_trials=0)
    search["hyperparameters"] = {"x": {"type": "int", "minval": low, "maxval": high, "count": count}}

    assert [trial.hparams["x"] for trial in play_grid(search).trials] == points[::-1]


@pytest.mark.parametrize("name", SEARCHERS)
def test_submitted_optimizer_keeps_type_and_search_space(name: str) -> None:
    """Submission stores constants, also the optimizer's ``type``, as ``const`` specs."""
    searched = {"type": "log", "minval": -4, "maxval": -2, "base": 10, "count": 2}
    text = yaml.safe_dump(
        {
            "searcher": {"metric": "loss", "max_time": 9, "time_metric": "epochs", "name": name}
            | {key: {"max_trials": 3, "num_rungs": 2}[key] for key in SEARCHERS[name].requires},
            "hyperparameters": {
                "overwrite_deepspeed_args": {"optimizer": {"type": "AdamW", "params": {"lr": searched}}}
            },
        }
    )

    submitted = search_section(yaml.safe_load(text))
    trial = Searcher.new(submitted, 0).initial_trials()[0]

    assert isinstance(trial, Create)
    optimizer = trial.hparams["overwrite_deepspeed_args"]["optimizer"]
    assert optimizer["type"] == "AdamW"
    assert 1e-4 <= optimizer["params"]["lr"] <= 1e-2
    num_previewed = sum(trials.count for trials in preview(submitted).trials)
    assert num_previewed == {"single": 1, "grid": 2}.get(name, 3)


@pytest.mark.parametrize("name", ["random", "grid"])
def test_log_range_overflow_is_reported(name: str) -> None:
    search = config(name)
    search["hyperparameters"] = {"x": {"type": "log", "minval": 309, "maxval": 400, "base": 10, "count": 2}}

    with pytest.raises(SearchError, match=r"type log is 10 to the power of .* Lower its maxval"):
        Searcher.new(search, 0).initial_trials()


def test_seeded_random_numbers_match_numpy() -> None:
    search = config("single")
    search["hyperparameters"] = {"x": {"type": "double", "minval": 0, "maxval": 1}}

    first = Searcher.new(search, 20).initial_trials()[0]

    assert isinstance(first, Create)
    assert first.hparams["x"] == pytest.approx(0.5881308010772742)
    assert first.trial_seed < 2**31
    assert first.request_id[14] == "4"


def test_bounded_integers_match_numpy_masked_rejection() -> None:
    ours, numpys = SearchRandom(7), np.random.RandomState(7)
    bounds = [2, 3, 10, 1, 1000, 2**31, 2**32, 5]

    assert [ours.integer_below(bound) for bound in bounds] == [
        int(numpys.randint(0, bound, dtype=np.int64)) for bound in bounds
    ]


@pytest.mark.parametrize("smaller_is_better", [True, False])
def test_non_finite_metric_values_are_ranked(smaller_is_better: bool) -> None:
    search = config(
        "async_halving",
        num_rungs=2,
        divisor=2,
        max_trials=7,
        max_concurrent_trials=7,
        smaller_is_better=smaller_is_better,
    )
    searcher = Searcher.new(search, 0)
    sign = 1 if smaller_is_better else -1
    reports = [
        "NaN",
        sign * float("inf"),
        sign * 10**400,
        sign * 1.0,
        sign * -(10**400),
        sign * -float("inf"),
    ]
    trials = [action.request_id for action in searcher.initial_trials()]
    stopped = []
    for trial, value in zip(trials, reports, strict=False):
        actions = searcher.validation_completed(trial, {"loss": value, "epochs": 4})
        stopped.append(any(isinstance(action, Stop) for action in actions))
        searcher = Searcher.restore(search, json.loads(json.dumps(searcher.snapshot(), allow_nan=False)))

    assert stopped == [False] * 6
    last = searcher.validation_completed(trials[6], {"loss": float("nan"), "epochs": 4})
    assert [type(action) for action in last] == [Stop]


def test_progress_ends_at_one() -> None:
    search = config("random", max_trials=4, max_concurrent_trials=2)
    searcher = Searcher.new(search, 0)
    first, second = (action.request_id for action in searcher.initial_trials())

    assert searcher.progress({first: 0.5, second: 0.5}) == pytest.approx(0.25)
    open_trials = [first, second]
    while open_trials:
        actions = searcher.trial_exited(open_trials.pop())
        open_trials += [action.request_id for action in actions if isinstance(action, Create)]
    assert searcher.progress({}) == 1.0
