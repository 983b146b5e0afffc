"""``run_ranks``: output callback, log files and outcome."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from dstrial.errors import LaunchError
from dstrial.launch.local_ranks import run_ranks

pytestmark = pytest.mark.process

PROGRAMS = Path(__file__).with_name("launch_programs.py")


def test_run_ranks_passes_lines_and_writes_logs(tmp_path: Path) -> None:
    lines: list[tuple[int, str, str]] = []
    outcome = run_ranks(
        [sys.executable, str(PROGRAMS), "show_arguments", "$x", "a b"],
        num_ranks=2,
        env={"MARK": "mine"},
        log_dir=tmp_path / "the logs",
        on_line=lambda rank, stream, line: lines.append((rank, stream, line)),
    )
    assert (outcome.exit_code, outcome.exit_codes, outcome.first_failure, outcome.stopped_by) == (
        0,
        (0, 0),
        None,
        None,
    )
    for rank in range(2):
        own = [(stream, line) for line_rank, stream, line in lines if line_rank == rank]
        assert [line for stream, line in own if stream == "stdout"] == ["['$x', 'a b'] mine"]
        assert [line for stream, line in own if stream == "stderr"] == [
            "",
            "progress 1",
            "progress 2",
            f"rank {rank}",
        ]
        assert (tmp_path / "the logs" / f"rank_{rank}" / "stdout.log").read_text() == "['$x', 'a b'] mine\n"
    assert "MARK" not in os.environ


def test_run_ranks_passes_lines_without_log_directory() -> None:
    lines: list[tuple[int, str, str]] = []
    script = "import os\nfor i in range(3000): print('line', i, 'x' * 100)"
    outcome = run_ranks(
        [sys.executable, "-c", script],
        num_ranks=2,
        on_line=lambda rank, stream, line: lines.append((rank, stream, line)),
    )
    assert outcome.exit_code == 0
    for rank in range(2):
        assert [text for r, _, text in lines if r == rank] == [f"line {i} {'x' * 100}" for i in range(3000)]


def test_failure_without_record_shows_log_tail(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS), "exit_with_7_on_rank_1"]
    outcome = run_ranks(command, num_ranks=2, log_dir=tmp_path)
    assert outcome.exit_code == 7
    assert outcome.first_failure is not None
    assert (outcome.first_failure.rank, outcome.first_failure.error) == (1, "about to give up")


def test_run_ranks_works_in_non_main_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(run_ranks([sys.executable, "-c", ""], num_ranks=1).exit_code)
    )
    thread.start()
    thread.join()
    assert codes == [0]


def test_closed_output_does_not_end_ranks() -> None:
    def fail(rank: int, stream: str, line: str) -> None:
        raise BrokenPipeError

    command = [sys.executable, "-c", "print('x' * 1_000_000)"]
    assert run_ranks(command, num_ranks=1, on_line=fail).exit_code == 0


def test_run_ranks_rejects_zero_ranks() -> None:
    with pytest.raises(LaunchError, match="number of ranks is 0; expected at least 1"):
        run_ranks([sys.executable], num_ranks=0)


@pytest.mark.parametrize("maker", ["from_deepspeed", "from_torch_distributed"])
def test_core_api_script_gets_distributed_context(maker: str, tmp_path: Path) -> None:
    script = (
        "from determined import core\n"
        f"ranks = core.DistributedContext.{maker}()\n"
        "print(ranks.allgather((ranks.rank, ranks.local_size, ranks.cross_size)))\n"
        "ranks.close()\n"
    )
    outcome = run_ranks([sys.executable, "-c", script], num_ranks=2, log_dir=tmp_path)
    assert outcome.exit_code == 0
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}" / "stdout.log").read_text() == "[(0, 2, 1), (1, 2, 1)]\n"


@pytest.mark.parametrize(("error", "is_consequence"), [("Connection closed by peer", True), ("no", False)])
def test_outcome_marks_peer_loss_as_consequence(error: str, is_consequence: bool) -> None:
    code = (
        "import json, os, sys\n"
        f"json.dump({{'message': {error!r}}}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "sys.exit(3)"
    )
    outcome = run_ranks([sys.executable, "-c", code], num_ranks=1)

    assert (outcome.exit_code, outcome.is_consequence) == (3, is_consequence)
    assert outcome.failed_s is not None
