"""Local backends: launchers of scripts, and persistent ranks with real engines."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from searching import settings_of, write_experiment
from waiting import wait_for

from dstrial.dsat.backends.local import Incumbent, LocalBackend, PersistentRanks, _Task
from dstrial.dsat.backends.trial_spec import TrialSpec, measuring_command, measuring_spec
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.local.json_files import read_json_lines, write_json_atomically

HERE = Path(__file__).parents[1] / "worked"
DEADLINE_S = 280

BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
X: dict[str, Any] = {"stage": 2}  # measured first and last
OTHERS: list[dict[str, Any]] = [
    {"stage": stage, **more}
    for stage in (3, 0, 1, 2)
    for more in ({}, {"reduce_bucket_size": 100_000}, {"overlap_comm": True})
] + [
    {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": False}, **more}
    for stage in (1, 2, 3)
    for more in ({}, {"reduce_bucket_size": 100_000})
]
OTHERS += [{"stage": 3, "stage3_param_persistence_threshold": 0}, {"stage": 3, "sub_group_size": 1000}]
# Every stage, and every option whose engine has its own threads, buffers or files.
OF_EACH_KIND: list[dict[str, Any]] = [
    OTHERS[0],
    {"stage": 0},
    {"stage": 1, "reduce_bucket_size": 100_000},
    {"stage": 2, "overlap_comm": True},
    {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 1000},
]


def _hparams(zero: dict[str, Any], fault: str = "") -> dict[str, Any]:
    return {
        "deepspeed_config": "ds.json",
        "fault": fault,
        "_dsat": {"max_s": 0.05, "window_s": 0.01, "min_windows": 2},
        "overwrite_deepspeed_args": {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
        },
    }


KNOBS = ("recomputes", "compiles", "read by nobody")


class Ranks:
    """Two persistent ranks, and the results that they have written."""

    def __init__(self, directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "ds.json").write_text(json.dumps(BASE))
        (directory / "model" / "worked_trials.py").write_text((HERE / "worked_trials.py").read_text())
        path = write_experiment(
            directory,
            entrypoint="worked_trials:WorkedTrial",
            hyperparameters={"deepspeed_config": "ds.json", "fault": ""},
            environment={"environment_variables": ["OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu"]},
        )
        output = str(directory / "out")
        self.settings = settings_of(path, "--local", "-m", "latency", "--output", output, method="predict")
        self.record = SearchRecord.open(self.settings.output, "", "predict", is_fresh=False)
        self.backend = self.made()

    def made(self) -> PersistentRanks:
        words = measuring_command(self.settings, str(self.settings.experiment.path), sys.executable)
        return PersistentRanks(self.settings, self.record, words)

    def begin(self, trial_id: int, hparams: dict[str, Any], best: Any = None) -> None:
        self.backend.start(TrialSpec(trial_id, {}, hparams, str(trial_id), best))

    def ended(self) -> Outcome:
        """Wait until the started trial ends and return its outcome."""
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not (ended := self.backend.poll()):
            assert time.monotonic() < give_up_at_s, self.output()[-4000:]
            time.sleep(0.02)
        return ended[0].outcome

    def output(self) -> str:
        return "".join(path.read_text() for path in self.record.ranks_path.glob("*/output.log"))

    def rows(self) -> list[dict[str, Any]]:
        """Return all written result rows; ``ranks`` counts the starts of the ranks."""
        return [
            {**row, "ranks": int(path.parent.name)}
            for path in sorted(self.record.ranks_path.glob("*/results.jsonl"))
            for row in read_json_lines(path)
        ]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    running = Ranks(tmp_path)
    yield running
    running.backend.close()


@pytest.mark.exhaustive("[one of each kind]")
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("others", [OF_EACH_KIND, OTHERS], ids=["one of each kind", "all"])
def test_persistent_ranks_keep_no_state_between_trials(ranks: Ranks, others: list[dict[str, Any]]) -> None:
    knobs = [{**_hparams(X), "knob": knob} for knob in KNOBS]
    wanted = [_hparams(X), *(_hparams(zero) for zero in others), *knobs, _hparams(X)]
    # The best result of an earlier process of the search.
    best = (_hparams(OTHERS[0]), {"latency": 1e9, "half_width": 0.01})
    outcomes = []
    for trial_id, hparams in enumerate(wanted, 1):
        ranks.begin(trial_id, hparams, best if trial_id == 1 else None)
        outcomes.append(ranks.ended())

    assert [outcome for outcome in outcomes if not isinstance(outcome, Measured)] == []
    rows = ranks.rows()
    assert {(row["ranks"], row["respawned"]) for row in rows} == {(1, "")}
    for name in ("num_tensors", "tensor_bytes", "num_groups", "num_threads", "num_files"):
        assert len({row["details"][name] for row in rows}) == 1, name
    alone, after_all = outcomes[0], outcomes[-1]
    for name in ("num_params", "train_batch_size", "activation_bytes_per_record"):
        assert _value(after_all, name) == _value(alone, name)
    recomputed, compiled, ignored = outcomes[-1 - len(KNOBS) : -1]
    assert _value(recomputed, "activation_bytes_per_record") == 4 * 32
    for name in ("probe_operations", "probe_flops_per_record"):
        assert _value(recomputed, name) > _value(alone, name)
    assert (_value(alone, "probe_compiled"), _value(compiled, "probe_compiled")) == (0, 1)
    for name in ("probe_operations", "activation_bytes_per_record", "num_params"):
        assert _value(ignored, name) == _value(alone, name), name
    assert _value(alone, "drift") is not None


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_persistent_ranks_classify_failures_and_respawn(ranks: Ranks) -> None:
    def measured(fault: str) -> Outcome:
        ranks.begin(1, _hparams(X, fault))
        return ranks.ended()

    together = {
        "user error": FailureKind.USER_ERROR,
        "bad config": FailureKind.BAD_CONFIG,
        "numeric": FailureKind.NUMERIC,
        "disk full": FailureKind.NO_ROOM,
    }
    failures = {fault: _failure(measured(fault)) for fault in together}
    assert {fault: failure.kind for fault, failure in failures.items()} == together
    assert "no such metric" in failures["user error"].message
    assert ranks.backend._number == 1
    keeps = measured("keeps memory")
    assert isinstance(keeps, Measured)
    (reason,) = {row["respawned"] for row in ranks.rows()} - {""}
    assert reason.startswith("rank 1 does not come back to what it was: ")
    assert "tensor_bytes" in reason

    oom = _failure(measured("out of memory"))
    assert (oom.kind, oom.rank, oom.phase) == (FailureKind.DEVICE_OOM, 1, "init")
    assert oom.requested_bytes == 3 * 2**30
    assert isinstance(measured(""), Measured)
    # Out of memory counts only after a repeat in fresh ranks: earlier trials may have left memory allocated.
    before = ranks.backend._number
    host = _failure(measured("host out of memory"))
    assert (host.kind, host.requested_bytes) == (FailureKind.HOST_OOM, 4 * 2**50)
    assert ranks.backend._number == before + 1
    assert _failure(measured("killed")).kind is FailureKind.HOST_OOM
    dies = _failure(measured("dies"))
    assert dies.kind is FailureKind.COMMUNICATION
    assert "exit code 3" in dies.message

    ranks.begin(2, _hparams(X, "hangs"))
    wait_for(lambda: ranks.backend.poll() or ranks.backend.running_s(2) > 0)
    ranks.backend.kill(2)
    assert ranks.backend._launcher is None
    assert isinstance(measured(""), Measured)


@pytest.mark.process
def test_killed_search_ends_script_launcher_counts_attempt(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, time\npathlib.Path('rank').write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    path = write_experiment(
        tmp_path, BASE, entrypoint="python3 -m dstrial.launch train.py", resources={"slots_per_trial": 1}
    )
    (tmp_path / "model" / "train.py").write_text(program)
    settings = settings_of(path, "--local", "--output", str(tmp_path / "out"))
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    spec = measuring_spec(settings, settings.space.own(), 1, record.search_id)
    killed, pid = LocalBackend(settings, record), tmp_path / "model" / "rank"
    assert killed.start(spec) == {"attempt": 1}
    assert killed.poll() == []
    wait_for(lambda: pid.exists() and pid.read_text(), deadline_s=120.0)
    # A script's ranks are new processes, not forks, so /proc shows their variables.
    assert b"RANK=0" in Path(f"/proc/{pid.read_text()}/environ").read_bytes().split(b"\0")

    again = LocalBackend(settings, record)
    assert not again.adopt(spec, {"attempt": 1})
    wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists())
    assert again.start(spec) == {"attempt": 2}
    assert LocalBackend(settings, record).adopt(spec, {"attempt": 2})
    # A result that was written after the search was killed counts.
    write_json_atomically(record.trial_path(1) / "result.json", {"metrics": {"latency": 2.0}})
    assert again.adopt(spec, {"attempt": 1})
    assert again._ended[-1].outcome == Measured({"latency": 2.0})


@pytest.mark.process
def test_killed_search_ends_persistent_ranks_counts_attempt(ranks: Ranks) -> None:
    ranks.begin(1, _hparams(X))
    ranks.backend.poll()
    launcher = ranks.backend._launcher
    assert launcher is not None

    again = ranks.made()

    assert launcher.exit_code is not None
    # A trial that was killed with its search once is retried; the second time it fails.
    spec = TrialSpec(1, {}, _hparams(X), "1")
    assert not again.adopt(spec, {"attempt": 1})
    assert again.start(spec) == {"attempt": 2}
    again.kill(1)
    assert again.adopt(spec, {"attempt": 2})
    (ended,) = again.poll()
    assert _failure(ended.outcome).kind is FailureKind.HOST_OOM


def test_challenger_result_survives_hanging_incumbent_remeasurement(ranks: Ranks) -> None:
    measured = Measured({"latency": 100.0})
    task = _Task(TrialSpec(3, {}, _hparams(X), "3"), _hparams(X), began_s=time.time(), challenger=measured)
    ranks.backend._task = task

    ranks.backend.kill(3)

    (ended,) = ranks.backend.poll()
    assert (ended.trial_id, ended.outcome) == (3, measured)


def _value(outcome: Outcome, name: str) -> float | None:
    assert isinstance(outcome, Measured)
    return outcome.value(name)


def _failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure), outcome
    return outcome


def test_incumbent_drift_correction_rescales_challenger() -> None:
    """The machine became 1.1 times slower; the challenger's times are divided by 1.1."""
    best = Incumbent("throughput")
    first = Measured({"latency": 100.0, "throughput": 10.0, "half_width": 0.01})
    best.consider({"name": "first"}, first)
    now = Measured({"latency": 110.0, "throughput": 9.1, "half_width": 0.01})
    times = {"latency": 104.5, "throughput": 9.57, "end_to_end_throughput": 9.5, "half_width": 0.01}
    challenger = Measured({**times, "num_params": 5.0})
    assert best.is_worth_measuring_again(challenger)
    assert not best.is_worth_measuring_again(Measured({"throughput": 5.0}))

    corrected = best.without_drift(challenger, now)

    assert corrected.metrics["latency"] == pytest.approx(95.0)
    assert corrected.metrics["throughput"] == pytest.approx(10.527)
    assert corrected.metrics["end_to_end_throughput"] == 9.5
    assert (corrected.metrics["num_params"], corrected.metrics["drift"]) == (5.0, pytest.approx(1.1))
    within = dataclasses.replace(now, metrics={**now.metrics, "half_width": 0.1})
    assert best.without_drift(challenger, within).metrics["drift"] == 1.0
    assert best.without_drift(challenger, Failure(FailureKind.TIMEOUT, "")) == challenger
    best.consider({"name": "second"}, corrected)
    assert best.hparams == {"name": "second"}
