"""Background checkpoints: slow storage, write failures and killed ranks."""

import json
import pathlib

import pytest
from forked_ranks import RunningProgram

from dstrial.local.checkpoint_directory import remove_incomplete_checkpoints
from dstrial.local.run_directory import RunDirectory

pytestmark = pytest.mark.ranks

TESTS = pathlib.Path(__file__).parent.parent

SCENARIOS = ["storage hangs", "one rank fails", "end fails", "rank dies", "user code fails", "written twice"]


class Program:
    """A program on two ranks that runs SCENARIOS, and its run directories."""

    def __init__(self, running, run_dirs):
        self.running = running
        self.run_dirs = run_dirs

    def results_by_rank(self, name):
        results = self.running.result(name)
        for rank, result in enumerate(results):
            if isinstance(result, dict) and "error" in result and result["error"] != "ended":
                raise AssertionError(f"rank {rank}: {result}")
        return results

    def steps(self, name):
        marks = pathlib.Path(self.run_dirs[name]).glob("checkpoints/*/COMPLETE")
        return sorted(json.loads(mark.read_text())["steps_completed"] for mark in marks)

    def names(self, name):
        return sorted(path.name for path in pathlib.Path(self.run_dirs[name]).glob("checkpoints/*"))


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    scratch = tmp_path_factory.mktemp("saving")
    run_dirs = {
        name: str(
            RunDirectory.create(
                scratch / name, name="saving", context_dir=scratch, command=["t"], config={}
            ).path
        )
        for name in SCENARIOS
    }
    ranks = scratch / "ranks"
    ranks.mkdir()
    asked = {"scratch": str(ranks), "run_dirs": run_dirs}
    folders = (TESTS, TESTS / "trainer")
    with RunningProgram("saving_ranks", asked, scratch, *folders) as running:
        yield Program(running, run_dirs)


def test_training_continues_while_storage_hangs(program):
    for rank, (seen, fitted, complete) in enumerate(program.results_by_rank("storage hangs")):
        assert seen == ([[]] if rank == 0 else []), "at batch 3, that of batch 2 is not complete"
        assert "batches_trained=8" in fitted
        assert complete == [2, 4, 6, 8]


def test_write_failure_fails_all_ranks_at_same_batch(program):
    last_batches = []
    for name, message, uuids, last_batch in program.results_by_rank("one rank fails"):
        assert name == "CheckpointError"
        assert "at batch 4 cannot be written by rank 1" in message
        assert "Is a directory" in message
        assert len(uuids) == 1
        assert 4 <= last_batch < 10_000
        last_batches.append(last_batch)
    assert last_batches[0] == last_batches[1]
    assert program.steps("one rank fails") == [2]
    assert len(program.names("one rank fails")) == 1


def test_last_checkpoint_failure_is_raised_at_end(program):
    for name, message in program.results_by_rank("end fails"):
        assert name == "CheckpointError"
        assert "at batch 3 cannot be written by rank 1" in message
    assert program.names("end fails") == []


def test_killed_rank_leaves_removable_incomplete_checkpoint(program):
    chief, killed = program.results_by_rank("rank dies")
    assert killed["error"] == "ended"
    assert isinstance(chief, str) or chief["error"] == "ended", "training went on without a rank"
    assert program.steps("rank dies") == [2]
    (complete,) = [
        mark.parent.name
        for mark in pathlib.Path(program.run_dirs["rank dies"]).glob("checkpoints/*/COMPLETE")
    ]
    remove_incomplete_checkpoints(pathlib.Path(program.run_dirs["rank dies"]) / "checkpoints")
    assert program.names("rank dies") == [complete]


def test_pending_checkpoint_completes_when_user_code_fails(program):
    assert program.results_by_rank("user code fails") == [["KeyError", [4]]]


def test_background_files_equal_synchronous_save_bitwise(program):
    for result in program.results_by_rank("written twice"):
        for kind, (num_files, differing) in result.items():
            assert num_files >= 4, kind
            assert differing == [], kind
