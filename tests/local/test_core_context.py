"""The local implementation of Determined's core context."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import determined as det
import pytest
from determined import core
from rank_processes import on_ranks

from dstrial.errors import LaunchError
from dstrial.local.core_context import LocalContext, LocalPreemptContext, init
from dstrial.local.json_files import read_json
from dstrial.local.run_directory import RunDirectory


def local_context(run_directory: RunDirectory | Path, max_length: Any = None) -> LocalContext:
    searcher = {"metric": "loss", "max_length": max_length}
    return init(run_directory, {"searcher": searcher}, distributed=core.DummyDistributedContext())


def test_local_context_implements_determined_core_context(run_directory: RunDirectory) -> None:
    with local_context(run_directory.path) as context:
        assert isinstance(context, core.Context)
        context.train.report_validation_metrics(3, {"loss": 0.25})
        assert context.train.get_experiment_best_validation() == 0.25
        with context.checkpoint.store_path({"steps_completed": 3}, shard=True) as (path, _):
            (path / "state").write_text("x")
        assert not context.preempt.should_preempt()
        context.profiler.on()
        context.profiler.off()
    assert [entry.steps_completed for entry in context.checkpoint.list()] == [3]


def test_close_writes_throttled_progress(run_directory: RunDirectory) -> None:
    with local_context(run_directory) as context:
        for batch in range(5):
            context.train.report_batches(batch, 100)
    assert read_json(run_directory.progress_path)["batches_trained"] == 4


def test_invalid_hp_is_recorded_as_early_exit(run_directory: RunDirectory) -> None:
    with pytest.raises(SystemExit), local_context(run_directory):
        raise det.InvalidHP
    assert read_json(run_directory.status_path)["early_exit"] == "INVALID_HP"


def test_init_rejects_path_without_run_directory(tmp_path: Path) -> None:
    with pytest.raises(LaunchError):
        local_context(tmp_path)


class TestSearcher:
    def test_operations_without_max_length_raises(self, run_directory: RunDirectory) -> None:
        with (
            local_context(run_directory) as context,
            pytest.raises(ValueError, match=r"searcher\.max_length"),
        ):
            list(context.searcher.operations())

    def test_operations_yields_configured_length_once(self, run_directory: RunDirectory) -> None:
        with local_context(run_directory, max_length={"batches": 40}) as context:
            lengths = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                for operation in context.searcher.operations():
                    lengths.append(operation.length)
                    operation.report_progress(10)
                    operation.report_completed(0.5)
            assert lengths == [40]
            assert context.searcher.get_configured_units() is core.Unit.BATCHES
        assert read_json(run_directory.progress_path)["progress"] == 0.25


class TestPreempt:
    def test_should_preempt_follows_stop_function(self) -> None:
        reasons: list[str] = []
        preempt = LocalPreemptContext(
            core.DummyDistributedContext(), lambda: reasons[0] if reasons else None
        ).start()
        assert not preempt.should_preempt()
        reasons.append("SIGTERM")
        assert preempt.should_preempt()
        preempt.acknowledge_preemption_signal()

    def test_should_preempt_before_start_raises(self) -> None:
        with pytest.raises(RuntimeError, match=r"before PreemptContext\.start"):
            LocalPreemptContext(core.DummyDistributedContext(), lambda: None).should_preempt()


def ask_whether_to_stop(dist: core.DistributedContext, mode: core.PreemptMode) -> bool:
    reason = "SIGTERM" if dist.rank == 1 else None
    return LocalPreemptContext(dist, lambda: reason, mode).start().should_preempt()


@pytest.mark.process
def test_preempt_mode_selects_stopping_ranks() -> None:
    assert on_ranks(2, ask_whether_to_stop, core.PreemptMode.WorkersAskChief) == [False, False]
    assert on_ranks(2, ask_whether_to_stop, core.PreemptMode.WorkersAskMaster) == [False, True]
    chief, worker = on_ranks(2, ask_whether_to_stop, core.PreemptMode.ChiefOnly)
    assert chief is False
    assert isinstance(worker, RuntimeError)
