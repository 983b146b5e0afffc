"""The local backend: launchers of scripts and of trial classes with real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from searching import environment, settings_of, write_experiment
from waiting import wait_for

from dstrial.dsat.backends.local import LocalBackend
from dstrial.dsat.backends.trial_spec import TrialSpec, measuring_spec
from dstrial.dsat.core.journal import SearchRecord
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.local.json_files import write_json_atomically

HERE = Path(__file__).parents[1]
DEADLINE_S = 280

BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


class Ranks:
    """A search that measures ``WorkedTrial`` on two ranks."""

    def __init__(self, directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "ds.json").write_text(json.dumps(BASE))
        (directory / "model" / "worked_trials.py").write_text((HERE / "worked/worked_trials.py").read_text())
        self.config: dict[str, Any] = {
            "entrypoint": "worked_trials:WorkedTrial",
            "hyperparameters": {"deepspeed_config": "ds.json", "fault": ""},
            "environment": {"environment_variables": ["OMP_NUM_THREADS=1", "DS_ACCELERATOR=cpu"]},
        }
        path = write_experiment(directory, **self.config)
        output = str(directory / "out")
        self.settings = settings_of(path, "--local", "-m", "latency", "--output", output, method="predict")
        self.record = SearchRecord.open(self.settings.output, "", "predict", is_fresh=False)
        self.backend = LocalBackend(self.settings, self.record)
        self._num_trials = 0

    def begin(self, **hparams: Any) -> int:
        """Start a trial with these hyperparameters; return its id."""
        self._num_trials += 1
        given = {
            "deepspeed_config": "ds.json",
            "fault": "",
            "_use_dsat_mode": True,
            "_around_fit": "dstrial.dsat.rank.context:around_fit",
            "_dsat": {"max_s": 0.05, "window_s": 0.01, "min_windows": 2},
            "overwrite_deepspeed_args": {
                "zero_optimization": {"stage": 2},
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            **hparams,
        }
        searcher = {**self.settings.written["searcher"], "max_length": {"batches": 1_000_000}}
        config = {**self.settings.written, "searcher": searcher, "hyperparameters": given}
        self.backend.start(TrialSpec(self._num_trials, config, given, str(self._num_trials)))
        return self._num_trials

    def measured(self, **hparams: Any) -> Outcome:
        """Return the outcome of a trial with these hyperparameters."""
        trial_id = self.begin(**hparams)
        give_up_at_s = time.monotonic() + DEADLINE_S
        while not (ended := self.backend.poll()):
            assert time.monotonic() < give_up_at_s, self.backend.output_of(trial_id)[-4000:]
            time.sleep(0.02)
        return ended[0].outcome


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    running = Ranks(tmp_path)
    yield running
    running.backend.close()


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_recomputation_saves_activations_and_adds_hardware_flops(ranks: Ranks) -> None:
    alone, recomputed = (ranks.measured(knob=knob) for knob in ("", "recomputes"))

    assert _value(recomputed, "activation_bytes_per_record") == 4 * 32
    assert (_value(alone, "activation_bytes_per_record") or 0) > 4 * 32
    assert _value(alone, "hardware_FLOPS_per_gpu") == _value(alone, "FLOPS_per_gpu")
    assert (_value(recomputed, "hardware_FLOPS_per_gpu") or 0) > (_value(recomputed, "FLOPS_per_gpu") or 0)
    assert _value(recomputed, "num_params") == _value(alone, "num_params")


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_telemetry_is_on_in_measured_trial(ranks: Ranks) -> None:
    assert isinstance(ranks.measured(), Measured)

    assert [*ranks.record.trial_path(1).glob("runs/*/*/telemetry.json")]


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_failed_ranks_are_classified(ranks: Ranks) -> None:
    kinds = {
        "user error": FailureKind.USER_ERROR,
        "bad config": FailureKind.BAD_CONFIG,
        "numeric": FailureKind.NUMERIC,
        "disk full": FailureKind.NO_ROOM,
        "out of memory": FailureKind.DEVICE_OOM,
        "host out of memory": FailureKind.HOST_OOM,
        "killed": FailureKind.HOST_OOM,
        "dies": FailureKind.COMMUNICATION,
    }
    failures = {fault: _failure(ranks.measured(fault=fault)) for fault in kinds}

    assert {fault: failure.kind for fault, failure in failures.items()} == kinds
    assert "no such metric" in failures["user error"].message
    oom = failures["out of memory"]
    assert (oom.rank, oom.phase, oom.requested_bytes) == (1, "init", 3 * 2**30)
    assert failures["host out of memory"].requested_bytes == 4 * 2**50
    assert "exit code 3" in failures["dies"].message

    hanging = ranks.begin(fault="hangs")
    wait_for(lambda: ranks.backend.poll() or ranks.backend.running_s(hanging) > 0)
    ranks.backend.kill(hanging)
    assert ranks.backend.running_s(hanging) == 0
    assert ranks.backend.poll() == []
    assert isinstance(ranks.measured(), Measured)
    hanging = ranks.begin(fault="hangs")
    wait_for(lambda: ranks.backend.poll() or ranks.backend.running_s(hanging) > 0)
    write_json_atomically(ranks.record.trial_path(hanging) / "result.json", {"metrics": {"latency": 2.0}})
    ranks.backend.kill(hanging)
    assert [one.outcome for one in ranks.backend.poll()] == [Measured({"latency": 2.0})]


@pytest.mark.process
@pytest.mark.parametrize("is_script", [True, False], ids=["script", "trial class"])
def test_cpu_rank_has_one_thread(is_script: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a slot of the master that ``dstrial run`` starts, which trains with the best config afterwards."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path = write_experiment(
        tmp_path,
        BASE,
        entrypoint="python3 -m dstrial.launch train.py" if is_script else "model_def:MyTrial",
        resources={"slots_per_trial": 1},
    )
    prints = "import torch\nprint('threads', torch.get_num_threads())\nclass MyTrial:\n    pass\n"
    for name in ("train.py", "model_def.py"):
        (tmp_path / "model" / name).write_text(prints)
    settings = settings_of(path, "--local", "--output", str(tmp_path / "out"))
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    backend = LocalBackend(settings, record)

    backend.start(measuring_spec(settings, settings.space.own(), 1, record.search_id))
    wait_for(backend.poll, deadline_s=120.0)

    assert "threads 1\n" in backend.output_of(1)
    backend.close()


def test_measured_config_reports_as_often_as_training(tmp_path: Path) -> None:
    path = write_experiment(tmp_path, BASE, scheduling_unit=7, min_validation_period={"batches": 7})
    settings = settings_of(path, "--local", "--output", str(tmp_path / "out"))

    config = measuring_spec(settings, settings.space.own(), 1, "0").config

    assert config["scheduling_unit"] == 7
    assert "min_validation_period" not in config


@pytest.mark.process
@pytest.mark.parametrize("is_script", [True, False], ids=["script", "trial class"])
def test_killed_search_ends_ranks_counts_attempt(is_script: bool, tmp_path: Path) -> None:
    pid = tmp_path / "model" / "rank"
    waits = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(1000)\n"
    waits += "class MyTrial:\n    pass\n"
    path = write_experiment(
        tmp_path,
        BASE,
        entrypoint="python3 -m dstrial.launch train.py" if is_script else "model_def:MyTrial",
        resources={"slots_per_trial": 1},
    )
    for name in ("train.py", "model_def.py"):
        (tmp_path / "model" / name).write_text(waits)
    settings = settings_of(path, "--local", "--output", str(tmp_path / "out"))
    record = SearchRecord.open(settings.output, settings.fingerprint, settings.method, is_fresh=False)
    spec = measuring_spec(settings, settings.space.own(), 1, record.search_id)
    begins = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        f"sys.path.insert(0, {str(HERE.parent)!r})\n"
        "import pathlib\n"
        "from searching import settings_of\n"
        "from dstrial.dsat.backends.local import LocalBackend\n"
        "from dstrial.dsat.backends.trial_spec import measuring_spec\n"
        "from dstrial.dsat.core.journal import SearchRecord\n"
        f"settings = settings_of(pathlib.Path({str(path)!r}), '--local', '--output', {str(settings.output)!r})\n"
        f"backend = LocalBackend(settings, SearchRecord(settings.output, {record.search_id!r}))\n"
        f"backend.start(measuring_spec(settings, settings.space.own(), 1, {record.search_id!r}))\n"
        "while True:\n"
        "    backend.poll()\n"
        "    time.sleep(0.1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", begins], env=environment()) as search:
        try:
            wait_for(lambda: pid.exists() and pid.read_text(), deadline_s=120.0)
        finally:
            os.kill(search.pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid.read_text()}").exists())

    again = LocalBackend(settings, record)
    assert not again.adopt(spec, {"attempt": 1})
    assert again.start(spec) == {"attempt": 2}
    third = LocalBackend(settings, record)
    assert third.adopt(spec, {"attempt": 2})
    assert _failure(third.poll()[0].outcome).kind is FailureKind.HOST_OOM
    # A result that was written after the search was killed counts.
    write_json_atomically(record.trial_path(1) / "result.json", {"metrics": {"latency": 2.0}})
    fourth = LocalBackend(settings, record)
    assert fourth.adopt(spec, {"attempt": 1})
    assert fourth.poll()[0].outcome == Measured({"latency": 2.0})


def _value(outcome: Outcome, name: str) -> float | None:
    assert isinstance(outcome, Measured), outcome
    return outcome.value(name)


def _failure(outcome: Outcome) -> Failure:
    assert isinstance(outcome, Failure), outcome
    return outcome
