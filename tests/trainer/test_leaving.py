"""Ranks that exit with code 0 before training ends, and ranks that never exit."""

import re
import subprocess
import sys

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks


def leaving_config(how, ranks, leave_at=4):
    given = {"deepspeed_config": deepspeed_config(1), "num_records": 64}
    given |= {"how": how, "leaving_ranks": ranks, "leave_at": leave_at}
    return experiment(given, 12, report=5, validate=1000, checkpoint=1000)


@pytest.mark.exhaustive("[one-sys.exit]", "[all-os._exit]")
@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
@pytest.mark.parametrize("ranks", [[1], [0, 1]], ids=["one", "all"])
def test_exit_0_during_training_fails_rank(tmp_path, how, ranks):
    run = train(tmp_path, "LeavingTrial", leaving_config(how, ranks), ranks=2, module="leaving_trials")
    assert run.returncode == 1, run.output
    first = "rank 1" if ranks == [1] else "rank "
    assert f"{first}" in run.output.partition(" failed first (exit code")[0].rpartition("\n")[2], run.output
    assert "exit code 0" in run.output
    assert "at batch 4" in run.output
    assert "Connection closed by peer" not in run.output
    if how == "sys.exit":
        assert "leaving_trials.py" in run.output, "the line of user code"
        assert "at batch 4 of 12" in run.output


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
def test_exit_0_before_training_fails_trial(tmp_path, how):
    run = train(tmp_path, "LeavingTrial", leaving_config(how, [0], -1), module="leaving_trials")
    assert run.returncode == 1, run.output
    assert "rank 0 failed first" in run.output
    assert "exit code 0" in run.output


# A launcher with an exit timeout of 10 s instead of a minute.
HURRIED = """
import sys
from dstrial.launch.stalls import watch
watch.EXIT_TIMEOUT_S = 10.0
from dstrial.launch.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def launch_hurried(words, **options):
    return subprocess.run(
        [sys.executable, "-c", HURRIED, *words[1:]], capture_output=True, text=True, check=False, **options
    )


def test_rank_held_after_training_is_named_and_ended(tmp_path):
    """A thread keeps rank 1 alive, and an exit handler rank 2; rank 0 exits."""
    run = train(
        tmp_path,
        "StayingTrial",
        leaving_config("", []),
        3,
        module="leaving_trials",
        run_program=launch_hurried,
        timeout_s=100,
    )
    assert run.returncode == 0, run.output
    for rank in (1, 2):
        (line,) = re.findall(f"warning: rank {rank} has not ended 10 s after its program: .*", run.output)
        assert "serve_for_ever (leaving_trials.py:" in line
    assert "rank 0 has not ended" not in run.output
    assert run.checkpoints() == [12]
