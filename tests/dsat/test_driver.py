"""The search driver: journal, kills, deadlines, budget; formulas replace trials."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from searching import events, settings_of, write_experiment
from surfaces import BASE, surface
from waiting import wait_for

from dstrial.config.documents import read_yaml
from dstrial.dsat.backends.base import Ended
from dstrial.dsat.backends.local import LocalBackend
from dstrial.dsat.backends.trial_spec import TrialSpec, full_config
from dstrial.dsat.config import SearchConfig, with_parallel
from dstrial.dsat.core.candidate import BatchSplit, Candidate
from dstrial.dsat.core.journal import SearchRecord, SearchStatus
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, TrialResult, best_of
from dstrial.dsat.driver import FLOPS_RULE, Driver, mismatch_with_request, with_model_flops
from dstrial.dsat.report import summary
from dstrial.errors import ConfigError, LaunchError, SearchError


class _KilledError(BaseException):
    """Simulates the death of the search's process."""


class FormulaBackend:
    """A backend whose trials end at once or hang; ``world`` survives simulated kills."""

    def __init__(self, world: dict[str, Any], die_at: int | None = None) -> None:
        self.world = world
        self._die_at = die_at
        self._specs: dict[int, TrialSpec] = {}
        self._killed: list[int] = []

    num_parallel = 2

    def publish(self, report: Callable[[], Mapping[str, Any]]) -> bool:
        self.world.setdefault("shown", []).append(json.loads(json.dumps(report())))
        return not self.world.get("is_away")

    def finish(self, results: Mapping[str, str]) -> None:
        self._live()
        self.world["kept"] = dict(results)

    def _live(self) -> None:
        self.world["calls"] = self.world.get("calls", 0) + 1
        if self._die_at is not None and self.world["calls"] >= self._die_at:
            raise _KilledError

    def start(self, spec: TrialSpec) -> dict[str, Any]:
        self._live()
        if spec.trial_id not in self.world["started"]:
            self.world["started"][spec.trial_id] = self.world["started"].get(spec.trial_id, 0) + 1
        self._specs[spec.trial_id] = spec
        self._live()
        return {"n": spec.trial_id}

    def adopt(self, spec: TrialSpec, handle: Mapping[str, Any]) -> bool:
        if spec.trial_id not in self.world["started"]:
            return False
        assert handle == {"n": spec.trial_id}
        self._specs[spec.trial_id] = spec
        return True

    def poll(self) -> list[Ended]:
        self._live()
        if not self._specs or self.world.get("hangs"):
            return []
        trial_id = min(self._specs)
        candidate: Candidate = _candidate_of(self._specs.pop(trial_id))
        outcome = surface(candidate)
        if isinstance(outcome, Measured) and "reports" in self.world:
            outcome = Measured({**outcome.metrics, **self.world["reports"](trial_id, candidate)})
        return [Ended(trial_id, outcome, 10.0)]

    def running_s(self, trial_id: int) -> float:
        return float(self.world.get("hangs") or 0.0)

    def kill(self, trial_id: int) -> None:
        self._specs.pop(trial_id, None)
        self._killed.append(trial_id)

    def close(self) -> None:
        pass

    def describe(self) -> str:
        return "a formula"


def _candidate_of(spec: TrialSpec) -> Candidate:
    given = spec.config["hyperparameters"]["overwrite_deepspeed_args"]
    zero = given.get("zero_optimization") or BASE["zero_optimization"]
    settings = {f"zero_optimization.{key}": value for key, value in zero.items() if key != "stage"}
    return Candidate.from_json(
        {
            "stage": zero["stage"],
            "settings": settings,
            "batch": {
                "micro_batch_size": given["train_micro_batch_size_per_gpu"],
                "accumulation": given["gradient_accumulation_steps"],
                "train_batch_size": given["train_batch_size"],
            },
            "is_own": False,
        }
    )


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    return write_experiment(tmp_path, BASE, resources={"slots_per_trial": 8})


def _settings(experiment: Path, *flags: str) -> SearchConfig:
    output = ("--output", str(experiment.parent / "out"))
    return with_parallel(settings_of(experiment, "-m", "throughput", *flags, *output), 2)


def _run(
    settings: SearchConfig, world: dict[str, Any], die_at: int | None = None
) -> tuple[SearchStatus, Driver, list[str]]:
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    told: list[str] = []
    signals: list[signal.Signals] = world.get("signals", [])
    with record.lock():
        backend = FormulaBackend(world, die_at)
        driver = Driver(settings, record, None, lambda: backend, told.append, poll_s=0.0)
        return driver.run(signals), driver, told


def test_search_killed_repeatedly_measures_each_trial_once(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "6")
    undisturbed: dict[str, Any] = {"started": {}}
    end, driver, _ = _run(settings, undisturbed)
    expected = {one.trial_id: (one.candidate, one.outcome) for one in driver.trials.values()}
    files = {path.name: path.read_text() for path in settings.output.glob("best_*")}
    shutil.rmtree(settings.output)
    assert len(expected) == 6

    world: dict[str, Any] = {"started": {}}
    for _kill in range(60):
        world["calls"] = 0
        try:
            end, driver, _ = _run(settings, world, die_at=2 + _kill % 3)
            break
        except _KilledError:
            continue

    assert end.is_finished
    assert {one.trial_id: (one.candidate, one.outcome) for one in driver.trials.values()} == expected
    assert all(num == 1 for num in world["started"].values())
    assert {path.name: path.read_text() for path in settings.output.glob("best_*")} == files
    results = [row["trial_id"] for row in events(settings.output) if row["event"] == "result"]
    assert sorted(results) == [1, 2, 3, 4, 5, 6]
    assert "best_ds_config.json" in world["kept"]
    assert events(settings.output)[-1]["event"] == "finished"


def test_trial_killing_search_twice_is_out_of_memory(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_self: LocalBackend, _spec: TrialSpec) -> None:
        raise _KilledError

    monkeypatch.setattr(LocalBackend, "_launch", die)
    settings = _settings(experiment, "--max-trials", "3")
    for _ in range(3):
        record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
        backend = functools.partial(LocalBackend, settings, record)
        driver = Driver(settings, record, None, backend, lambda _: None, poll_s=0.0)
        with record.lock(), pytest.raises(_KilledError):
            driver.run([])

    # Each attempt is in the journal before it begins.
    submitted = [row for row in events(settings.output) if row["event"] == "submitted"]
    attempts = [row["handle"]["attempt"] for row in submitted if row["trial_id"] == 1]
    (result,) = [row for row in events(settings.output) if row["event"] == "result"]
    assert attempts == [1, 2]
    assert (result["trial_id"], result["failure"]["kind"]) == (1, "HOST_OOM")


def test_best_experiment_is_complete_report_names_dead_keys(
    experiment: Path,
) -> None:
    dead = {**BASE, "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 10**6}}
    (experiment.parent / "model" / "ds.json").write_text(json.dumps(dead))
    # PyYAML writes this string without quotes, which makes it a number in YAML 1.2.
    experiment.write_text(experiment.read_text() + 'description: "1e5"\n')
    settings = _settings(experiment, "--max-trials", "4")

    _, driver, _ = _run(settings, {"started": {}})

    best = best_of(list(driver.trials.values()), "throughput")
    assert best is not None
    written = read_yaml(settings.output / "best_experiment.yaml", "best").value
    assert written == full_config(settings, best.candidate)
    assert written["description"] == "1e5"
    assert written["searcher"] == yaml.safe_load(experiment.read_text())["searcher"]
    notes = json.loads((settings.output / "report.json").read_text())["notes"]
    assert [note for note in notes if "stage3_max_live_parameters" in note]


def test_running_report_is_published_until_received(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _settings(experiment, "--max-trials", "6")
    monkeypatch.setattr("dstrial.dsat.driver._REPORT_PERIOD_S", 0.0)
    often: dict[str, Any] = {"started": {}}
    _, driver, _ = _run(settings, often)
    measured = [sum(row["state"] == "measured" for row in one["trials"]) for one in often["shown"]]
    assert measured == sorted(measured)
    assert measured[0] < measured[-1]
    assert "running" in [row["state"] for row in often["shown"][0]["trials"]]
    assert not any(one["is_finished"] or one["reason"] for one in often["shown"])
    assert often["shown"][-1]["best"] in driver.trials
    shutil.rmtree(settings.output)

    # A report that the master did not receive is published again, even without new results.
    away: dict[str, Any] = {"started": {}, "is_away": True, "hangs": 1.0, "signals": []}
    monkeypatch.setattr(FormulaBackend, "poll", _interrupted_after(5))
    end, _, _ = _run(settings, away)
    assert end.stopped_by is signal.SIGINT
    assert len(away["shown"]) >= 4
    assert away["shown"][-1]["reason"] == "interrupted by SIGINT"


def _interrupted_after(num_polls: int) -> Any:
    def poll(self: FormulaBackend) -> list[Ended]:
        self.world["polls"] = self.world.get("polls", 0) + 1
        if self.world["polls"] == num_polls:
            self.world["signals"].append(signal.SIGINT)
        return []

    return poll


def test_record_open_refuses_locked_or_foreign_directory(
    experiment: Path,
) -> None:
    settings = _settings(experiment)

    def opened() -> SearchRecord:
        return SearchRecord.open(settings.output, settings.fingerprint, "asha", is_fresh=False)

    record = opened()
    assert (record.path / "search.json").exists()
    with record.lock(), pytest.raises(LaunchError, match="another process"), record.lock():
        pass
    (record.path / "search.json").rename(record.path / "thesis.tex")
    with pytest.raises(ConfigError, match="holds something else"):
        opened()


@pytest.mark.process
def test_search_stays_locked_while_process_trains(experiment: Path) -> None:
    """With ``--run-full-experiment`` the search's process executes the launcher."""
    record = SearchRecord.open(experiment.parent / "out", "", "asha", is_fresh=False)
    program = (
        "import os, pathlib, sys; from dstrial.dsat.core.journal import SearchRecord; "
        "lock = SearchRecord(pathlib.Path(sys.argv[1]), 'id').lock(); lock.__enter__(); "
        "os.execv('/bin/sleep', ['sleep', '600'])"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(record.path)]) as process:
        try:
            wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", deadline_s=60.0)
            with pytest.raises(LaunchError, match="another process"), record.lock():
                pass
        finally:
            process.kill()


def test_journal_torn_line_ignored_finished_search_starts_nothing(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "3")
    first, _, _ = _run(settings, {"started": {}})
    path = settings.output / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])

    end, driver, _ = _run(settings, {"started": {1: 1, 2: 1, 3: 1}})

    assert end == first
    assert all(one.outcome is not None for one in driver.trials.values())
    world: dict[str, Any] = {"started": {}}
    again, driver, told = _run(settings, world)
    assert (again, told, world["started"]) == (first, [], {})
    assert len(driver.trials) == 3


def test_interrupted_search_writes_results_and_resumes(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "4")
    world: dict[str, Any] = {"started": {}, "calls": 0}
    with pytest.raises(_KilledError):
        _run(settings, world, die_at=8)
    interrupted, _, _ = _run(settings, {**world, "signals": [signal.SIGINT]})

    assert (interrupted.is_finished, interrupted.stopped_by) == (False, signal.SIGINT)
    assert (settings.output / "best_ds_config.json").exists()
    end, driver, _ = _run(settings, world)
    assert end.is_finished
    assert len(driver.trials) == 4


def test_journal_result_of_another_configuration_raises(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "6")
    _run(settings, {"started": {}})
    journal = (settings.output / "events.jsonl").read_text()
    (settings.output / "events.jsonl").write_text(
        journal.replace('"micro_batch_size": 4', '"micro_batch_size": 5')
    )
    with pytest.raises(SearchError, match="trial 1 measured another configuration"):
        _run(settings, {"started": {}})


def test_hanging_trial_is_killed_at_deadline(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "3", "--trial-timeout", "100s")
    world: dict[str, Any] = {"started": {}, "hangs": 101.0}

    end, driver, _ = _run(settings, world)

    outcome = driver.trials[1].outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.TIMEOUT
    assert end.is_failure
    measure = driver._method.start()[0]  # type: ignore[attr-defined]
    assert driver.deadline_s(measure) == 100.0
    for seconds, deadline_s in ((10.0, 120.0), (60.0, 300.0)):
        driver.trials[1] = TrialResult(1, measure.candidate, "", "", Measured({"throughput": 1.0}), seconds)
        assert driver.deadline_s(measure) == deadline_s
    # The limit is 5 times the longest measured or predicted time, at least 120 s.
    predicted = [dataclasses.replace(measure, predicted_s=seconds) for seconds in (40.0, 80.0)]
    assert [driver.deadline_s(one) for one in predicted] == [300.0, 400.0]


def test_spent_budget_ends_search_until_budget_grows(experiment: Path) -> None:
    short = _settings(experiment, "--max-trials", "40", "--budget", "25s")
    # Two trials of 10 s run at a time; the budget counts the time of all processes of the search.
    with pytest.raises(_KilledError):
        _run(short, {"started": {}, "calls": 0}, die_at=20)
    end, driver, _ = _run(short, {"started": dict.fromkeys(range(1, 41), 1)})
    num_before = len([one for one in driver.trials.values() if one.outcome])

    assert (end.reason, end.is_failure) == ("the budget is spent", False)
    assert _run(short, {"started": {}})[0].reason == "the budget is spent"
    more = _settings(experiment, "--max-trials", "40", "--budget", "24h")
    end, driver, _ = _run(more, {"started": dict.fromkeys(range(1, 41), 1)})
    assert len([one for one in driver.trials.values() if one.outcome]) > num_before
    assert "trials completed" in end.reason or "nothing new" in end.reason


def test_dry_run_time_counts_against_budget(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "40", "--budget", "300s")
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    record.append("inputs", {"seconds": 301.0})

    end, driver, _ = _run(settings, {"started": {}})

    assert end.reason == "the budget is spent"
    assert not [one for one in driver.trials.values() if one.outcome]


def test_changed_settings_require_fresh_output_directory(experiment: Path) -> None:
    settings = _settings(experiment, "--max-trials", "2")
    _run(settings, {"started": {}})
    other = _settings(experiment, "--max-trials", "3")

    with pytest.raises(ConfigError, match="--fresh"):
        _run(other, {"started": {}})
    record = SearchRecord.open(other.output, other.fingerprint, "asha", is_fresh=True)
    assert record.path.name == "out-2"
    # Without --fresh the newest search with the same settings resumes, even one that began with --fresh.
    assert SearchRecord.open(other.output, other.fingerprint, "asha", is_fresh=False) == record
    assert SearchRecord.open(other.output, other.fingerprint, "asha", is_fresh=True).path.name == "out-3"
    first = SearchRecord.open(settings.output, settings.fingerprint, "asha", is_fresh=False)
    assert first.path == settings.output
    kinds = [event["event"] for event in events(settings.output)]
    assert kinds == ["submitted", "result", "submitted", "result", "finished"]


def test_own_configuration_wins_ties_summary_states_gain(experiment: Path) -> None:
    settings = _settings(experiment)
    record = SearchRecord.open(settings.output, settings.fingerprint, "asha", is_fresh=False)
    own, other = settings.space.own(), settings.space.smallest()

    def result(trial_id: int, candidate: Candidate, latency: float) -> TrialResult:
        return TrialResult(trial_id, candidate, "it", "", Measured({"latency": latency}))

    tied = [result(1, own, 100.0), result(2, other, 99.5)]
    better = [result(1, own, 100.0), result(2, other, 80.0)]

    assert best_of(tied, "latency") == tied[0]
    assert best_of(better, "latency") == better[1]
    printed = summary(record, better, "latency", reason="done", is_finished=True)
    assert "80 (+25.0% over your own configuration)" in printed
    assert printed.splitlines()[1].startswith("2 ")


@pytest.mark.parametrize("is_counted", [True, False])
def test_flops_metric_is_proportional_to_throughput(experiment: Path, is_counted: bool) -> None:
    settings = _settings(experiment, "--max-trials", "6", "-m", "FLOPS_per_gpu")
    # Trials report unrelated FLOPs or none; the driver rescales the first trial's count by throughput.
    counted = [3e12, 0.0, 9e12, 0.0, 1e15, 0.0] if is_counted else [float("nan")] * 6
    world: dict[str, Any] = {
        "started": {},
        "reports": lambda trial_id, _candidate: {"FLOPS_per_gpu": counted[trial_id - 1]},
    }

    end, driver, told = _run(settings, world)

    assert not end.is_failure
    measured = [one.outcome for one in driver.trials.values() if isinstance(one.outcome, Measured)]
    shares = {round(one.metrics["FLOPS_per_gpu"] / one.metrics["throughput"]) for one in measured}
    assert len(measured) > 3
    assert len(shares) == 1
    if is_counted:
        assert shares == {round(3e12 / measured[0].metrics["throughput"])}
    trials = list(driver.trials.values())
    assert best_of(trials, "FLOPS_per_gpu") == best_of(trials, "throughput") is not None
    assert sum("no FLOPs could be counted" in line for line in told) == (not is_counted)
    assert (settings.output / "best_ds_metrics.json").exists()


def test_ignored_configuration_ends_search_with_missing_call(
    experiment: Path,
) -> None:
    settings = _settings(experiment, "--max-trials", "6")
    world: dict[str, Any] = {
        "started": {},
        "reports": lambda _trial_id, _candidate: {"train_micro_batch_size_per_gpu": 4.0, "zero_stage": 1.0},
    }

    end, driver, told = _run(settings, world)

    assert "expected" in end.reason
    assert "get_ds_config_from_hparams" in end.reason
    assert isinstance(driver.trials[1].outcome, Measured)
    failed = [one for one in driver.trials.values() if isinstance(one.outcome, Failure)]
    assert {one.outcome.kind for one in failed if one.outcome} == {FailureKind.USER_ERROR}
    assert [line for line in told if "error in the training code" in line]
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    trials = list(driver.trials.values())
    for again in range(2):  # the search has ended, so the repeated command prints the same summary
        printed = summary(record, trials, "throughput", reason=end.reason, is_finished=end.is_finished)
        assert "correct what failed, and pass --fresh" in printed, again
        end, driver, _ = _run(settings, world)
        trials = list(driver.trials.values())


def test_uncounted_flops_come_from_dry_run_or_rule() -> None:
    nothing = Measured({"throughput": 8.0, "num_params": 1e9})

    described = with_model_flops(nothing, None, flops_per_record=1e12, num_replicas=4)
    ruled = with_model_flops(nothing, None, num_replicas=4)
    second = with_model_flops(Measured({"throughput": 16.0, "num_params": 1e9}), ruled)

    assert described.value("FLOPS_per_gpu") == 2e12
    assert not described.value(FLOPS_RULE)
    assert ruled.value("FLOPS_per_gpu") == 6e9 * 8 / 4
    assert second.value("FLOPS_per_gpu") == 6e9 * 16 / 4
    assert second.value(FLOPS_RULE)


def test_mismatch_with_requested_configuration_is_user_error() -> None:
    candidate = Candidate(2, (), BatchSplit(4, 2, 16))
    obedient = {"train_micro_batch_size_per_gpu": 4.0, "gradient_accumulation_steps": 2.0, "zero_stage": 2.0}

    assert mismatch_with_request(Measured(obedient), candidate) is None
    assert mismatch_with_request(Measured({"throughput": 1.0}), candidate) is None
    assert (
        mismatch_with_request(Measured({**obedient, "zero_stage": 1.0, "num_engines": 2.0}), candidate)
        is None
    )
    failure = mismatch_with_request(
        Measured({**obedient, "train_micro_batch_size_per_gpu": 8.0, "zero_stage": 1.0}), candidate
    )
    assert failure is not None
    assert failure.kind is FailureKind.USER_ERROR
    assert "train_micro_batch_size_per_gpu 8, zero_stage 1; expected 4, 2" in failure.message
