"""A run that is killed and resumed reports what the uninterrupted run reports, to the last bit."""

import pathlib
import tempfile

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks

# trial, ZeRO stage, loader workers, ranks
ARRANGEMENTS = [
    ("DataParallelTrial", 0, 0, 2),
    ("DataParallelTrial", 1, 1, 2),
    ("DataParallelTrial", 1, 1, 1),
    ("DataParallelTrial", 2, 0, 2),
    ("DataParallelTrial", 3, 0, 2),
    ("PipelineTrial", 0, 1, 2),
    ("PipelineTrial", 1, 0, 2),
]
# The table has all; that engines of every stage resume bit by bit is tested in `tests/engine/test_bitwise_resume.py`.
TESTED = [one for one in ARRANGEMENTS if one[:2] not in {("DataParallelTrial", 0), ("DataParallelTrial", 2)}]


def whole_and_resumed(tmp_path, trial, stage, num_workers, ranks):
    """Train 20 batches in one go, and again with the last rank killed inside batch 12 and the run resumed."""
    hyperparameters = {
        "deepspeed_config": deepspeed_config(stage),
        "num_workers": num_workers,
        "noise": 0.1,
        "num_records": 70,
    }
    config = experiment(hyperparameters, batches=20)
    whole = train(tmp_path / "whole", trial, config, ranks=ranks)
    assert whole.returncode == 0, whole.output
    env = {"KILL_AT": f"{ranks - 1}:12", "KILL_MARKER": str(tmp_path / "killed")}
    killed = train(tmp_path / "killed-run", trial, config, ranks=ranks, env=env)
    assert killed.returncode == 137, killed.output
    assert max(killed.checkpoints()) == 10
    resumed = train(tmp_path / "killed-run", trial, config, ranks=ranks, run=killed, env=env)
    assert resumed.returncode == 0, resumed.output
    return whole, resumed


# For loader workers each rank of each of the three runs starts a process that imports torch.
@pytest.mark.exhaustive("[DataParallelTrial-1-1-1]", "[DataParallelTrial-3-0-2]", "[PipelineTrial-1-0-2]")
@pytest.mark.parametrize(("trial", "stage", "num_workers", "ranks"), TESTED)
def test_a_killed_and_resumed_run_equals_the_uninterrupted_one(tmp_path, trial, stage, num_workers, ranks):
    whole, resumed = whole_and_resumed(tmp_path, trial, stage, num_workers, ranks)
    assert "resumed from checkpoint" in resumed.output
    assert list(whole.reports("training")) == [7, 14, 20]
    assert resumed.reports("training") == whole.reports("training")
    assert resumed.reports("validation") == whole.reports("validation")
    assert list(whole.reports("validation")) == [8, 16, 20]


def print_table():
    """Print the last training and validation losses of every arrangement as a Markdown table."""
    print("| arrangement | training loss, whole | resumed | validation loss, whole | resumed | equal |")
    print("|---|---|---|---|---|---|")
    for trial, stage, num_workers, ranks in ARRANGEMENTS:
        with tempfile.TemporaryDirectory() as scratch:
            runs = whole_and_resumed(pathlib.Path(scratch), trial, stage, num_workers, ranks)
            losses = [
                run.reports(group)[20][name]
                for group, name in (("training", "loss"), ("validation", "validation_loss"))
                for run in runs
            ]
        kind = "pipeline, 2 stages" if trial == "PipelineTrial" else f"data parallel, ranks: {ranks}"
        cells = " | ".join(repr(loss) for loss in losses)
        print(
            f"| ZeRO {stage}, {kind} | {cells} | {losses[0] == losses[1] and losses[2] == losses[3]} |",
            flush=True,
        )


if __name__ == "__main__":
    print_table()
