"""A living worker: real DeepSpeed engines on two ranks, built and taken out in the same processes, and ranks that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
import yaml
from waiting import wait_for

from dstrial.dsat.core.outcome import Failure, FailureKind, Measured
from dstrial.dsat.space.knob_effects import PROBES
from dstrial.dsat.worker.loop import Incumbent, drift_between, without_drift
from dstrial.dsat.worker.messages import Task, TaskQueue, TaskResult
from dstrial.dsat.worker.transport import (
    ANSWERS_NAME,
    ORDERS_NAME,
    notes_of,
    queue_from_notes,
    result_from_row,
    row_of,
)
from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json_lines, write_json_atomically

HERE = Path(__file__).parents[1] / "worked"
DEADLINE_S = 280

BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
X: dict[str, Any] = {"stage": 2}
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
# Every stage, and everything that has threads, buffers or files of its own.
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


class RunningWorker:
    """A worker of two ranks, and its files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        config = {
            "name": "worked",
            "entrypoint": "worked_trials:WorkedTrial",
            "hyperparameters": {"deepspeed_config": "ds.json", "fault": ""},
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
            "resources": {"slots_per_trial": 2},
        }
        (directory / "exp.yaml").write_text(yaml.safe_dump(config))
        (directory / "ds.json").write_text(json.dumps(BASE))
        (directory / "worked_trials.py").write_text((HERE / "worked_trials.py").read_text())
        where = ["--config", "exp.yaml", "--context-dir", "."]
        with (directory / "output.log").open("wb") as output:
            self.process = warm_start.Popen(
                [
                    *(sys.executable, "-m", "dstrial.launch", "--slots", "2", *where),
                    *("-m", "dstrial.dsat.worker", "--trial", "worked_trials:WorkedTrial", *where),
                    *("--mailbox", str(directory)),
                ],
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def tell(self, queue: TaskQueue) -> None:
        write_json_atomically(self.directory / ORDERS_NAME, queue.to_json(), sync=False)

    def variables_of_ranks(self) -> list[set[bytes]]:
        """Return the names of the variables that /proc shows of each living rank."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                is_rank = b"dstrial.dsat.rank.rank_server" in path.read_bytes()
                if is_rank and (path.parent / "cwd").resolve() == self.directory:
                    variables = (path.parent / "environ").read_bytes().split(b"\0")
                    found.append({variable.partition(b"=")[0] for variable in variables})
        return found

    def wait_for_output(self, text: str) -> None:
        give_up_at_s = time.monotonic() + DEADLINE_S
        while text not in (self.directory / "output.log").read_text():
            assert time.monotonic() < give_up_at_s
            time.sleep(0.05)

    def answers(self, num: int) -> list[TaskResult]:
        give_up_at_s = time.monotonic() + DEADLINE_S
        path = self.directory / ANSWERS_NAME
        while True:
            lines = read_json_lines(path) if path.exists() else []
            if len(lines) >= num:
                return [TaskResult.from_json(line) for line in lines]
            assert time.monotonic() < give_up_at_s, (self.directory / "output.log").read_text()[-4000:]
            assert self.process.poll() is None, (self.directory / "output.log").read_text()[-4000:]
            time.sleep(0.05)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[RunningWorker]:
    running = RunningWorker(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.terminate()
        try:
            running.process.wait(30)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()


@pytest.mark.exhaustive("[one of each kind]")
@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("others", "at_least"), [(OF_EACH_KIND, 12), (OTHERS, 22)], ids=["one of each kind", "all"]
)
def test_engines_leave_nothing_in_living_ranks_and_ranks_that_fail_are_replaced(
    worker: RunningWorker, others: list[dict[str, Any]], at_least: int
) -> None:
    knobs = [{**_hparams(X), "knob": knob} for knob in KNOBS]
    wanted = [_hparams(X), *(_hparams(zero) for zero in others), *knobs, _hparams(X)]
    told = ["user error", "bad config", "numeric", "disk full"]
    faults = [*told, "keeps memory", "out of memory", "", "hangs", "host out of memory", "killed", "dies"]
    wanted += [_hparams(X, fault) for fault in faults]
    orders = [
        Task(number, number, hparams, 15.0 if hparams["fault"] == "hangs" else DEADLINE_S, "latency")
        for number, hparams in enumerate(wanted, 1)
    ]
    # What an earlier worker of the search has measured as its best.
    best = {"hparams": _hparams(OTHERS[0]), "metrics": {"latency": 1e9, "half_width": 0.01}}
    orders[0] = dataclasses.replace(orders[0], best=best)
    worker.tell(TaskQueue(tuple(orders)))

    answers = {answer.number: answer for answer in worker.answers(len(orders))}
    # A search that ends while something is being measured does not wait for it.
    hangs_on = Task(len(orders) + 1, len(orders) + 1, _hparams(X, "hangs"), DEADLINE_S, "latency")
    worker.tell(TaskQueue((hangs_on,)))
    worker.wait_for_output(f"order {hangs_on.number} begins")
    # What replaces ranks are forks: they show the variables of what was executed before them.
    wait_for(lambda: len(worker.variables_of_ranks()) == 2, deadline_s=DEADLINE_S)
    is_fork = [b"MASTER_PORT" not in names for names in worker.variables_of_ranks()]
    assert is_fork == [os.environ.get(warm_start.SWITCH) != "0"] * 2
    worker.tell(TaskQueue((hangs_on,), results={}))

    assert worker.process.wait(60) == 0
    assert len(worker.answers(0)) == len(orders)
    num_sound = len(wanted) - len(faults)
    assert num_sound >= at_least
    sound = [answers[number] for number in range(1, num_sound + 1)]
    assert [answer.outcome for answer in sound if not isinstance(answer.outcome, Measured)] == []
    assert {(answer.generation, answer.respawned) for answer in sound} == {(1, "")}
    alone, after_all = sound[0], sound[-1]
    for name in ("num_tensors", "tensor_bytes", "num_groups", "num_threads", "num_files"):
        assert {answer.details[name] for answer in sound} == {alone.details[name]}, name
    for name in ("num_params", "train_batch_size", "activation_bytes_per_record"):
        assert _value(after_all, name) == _value(alone, name)

    recomputed, compiled, ignored = sound[-1 - len(KNOBS) : -1]
    assert _value(recomputed, "activation_bytes_per_record") == 4 * 32
    for name in ("probe_operations", "probe_flops_per_record"):
        assert _value(recomputed, name) > _value(alone, name)
    assert (_value(alone, "probe_compiled"), _value(compiled, "probe_compiled")) == (0, 1)
    for name in PROBES:
        assert ignored.outcome.value(name) == alone.outcome.value(name), name

    assert _value(alone, "drift") is not None
    by_fault = {fault: answers[num_sound + idx] for idx, fault in enumerate(faults, 1)}
    kinds = {fault: _failure(by_fault[fault]).kind for fault in (*told, "host out of memory", "dies")}
    assert kinds == {
        "user error": FailureKind.USER_ERROR,
        "bad config": FailureKind.BAD_CONFIG,
        "numeric": FailureKind.NUMERIC,
        "disk full": FailureKind.NO_ROOM,
        "host out of memory": FailureKind.HOST_OOM,
        "dies": FailureKind.COMMUNICATION,
    }
    assert {by_fault[fault].generation for fault in told} == {1}
    assert "no such metric" in _failure(by_fault["user error"]).message
    assert "exit code 3" in _failure(by_fault["dies"]).message
    assert _failure(by_fault["host out of memory"]).requested_bytes == 4 * 2**50
    keeps, oom, again, hangs, killed = (
        by_fault[fault] for fault in ("keeps memory", "out of memory", "", "hangs", "killed")
    )
    assert isinstance(keeps.outcome, Measured)
    assert keeps.respawned.startswith("rank 1 does not come back to what it was: ")
    assert "tensor_bytes" in keeps.respawned
    failure = _failure(oom)
    assert (failure.kind, failure.rank, failure.phase) == (FailureKind.DEVICE_OOM, 1, "init")
    assert failure.requested_bytes == 3 * 2**30
    assert isinstance(again.outcome, Measured)
    assert _failure(hangs).kind is FailureKind.TIMEOUT
    assert _failure(killed).kind is FailureKind.HOST_OOM
    assert _failure(killed).rank == 1
    assert [answers[number].generation for number in range(num_sound + 5, len(orders) + 1)] == [
        *(1, 2, 3, 3, 4, 5, 6)
    ]


def _value(answer: TaskResult, name: str) -> float | None:
    assert isinstance(answer.outcome, Measured)
    return answer.outcome.value(name)


def _failure(answer: TaskResult) -> Failure:
    assert isinstance(answer.outcome, Failure)
    return answer.outcome


def test_orders_survive_as_notes_and_answers_as_a_row_of_metrics() -> None:
    order = Task(3, 7, {"a": {"b": [1, None]}}, 120.0, "throughput")
    queue = TaskQueue((order,), {"best_ds_config.json": "{}"})
    assert queue_from_notes(notes_of(queue)) == queue
    assert queue_from_notes("what I thought about this") == TaskQueue()
    with pytest.raises(DstrialError, match="no orders"):
        queue_from_notes(notes_of(queue)[:-5])

    for outcome in (Measured({"latency": 2.0}), Failure(FailureKind.DEVICE_OOM, "no room", "step", 5)):
        answer = TaskResult(3, outcome, 1.5, 2, "out of memory", {"build_s": 0.1})
        assert result_from_row(row_of(answer)) == answer


def test_a_machine_that_became_slower_takes_nothing_from_a_better_configuration() -> None:
    best = Incumbent()
    first = Measured({"latency": 100.0, "throughput": 10.0, "half_width": 0.01})
    best.consider({"name": "first"}, first, "throughput")
    now = Measured({"latency": 110.0, "throughput": 9.1, "half_width": 0.01})
    times = {"latency": 104.5, "throughput": 9.57, "end_to_end_throughput": 9.5, "half_width": 0.01}
    challenger = Measured({**times, "num_params": 5.0})
    assert best.is_worth_measuring_again(challenger, "throughput")
    assert not best.is_worth_measuring_again(Measured({"throughput": 5.0}), "throughput")
    assert not best.is_worth_measuring_again(Failure(FailureKind.TIMEOUT, ""), "throughput")

    drift = drift_between(first, now)
    corrected = without_drift(challenger, drift)

    assert drift == pytest.approx(1.1)
    assert corrected.metrics["latency"] == pytest.approx(95.0)
    assert corrected.metrics["throughput"] == pytest.approx(10.527)
    assert corrected.metrics["end_to_end_throughput"] == 9.5
    assert (corrected.metrics["num_params"], corrected.metrics["drift"]) == (5.0, pytest.approx(1.1))
    best.consider({"name": "second"}, corrected, "throughput")
    assert best.hparams == {"name": "second"}
    within = dataclasses.replace(now, metrics={**now.metrics, "half_width": 0.1})
    assert drift_between(first, within) == 1.0
