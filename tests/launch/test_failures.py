"""Choice of the first failed rank, error files and exit codes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dstrial.launch import __main__ as launcher
from dstrial.launch.failures import (
    LaunchOutcome,
    RankEnding,
    RankFailure,
    first_ending,
    is_consequence,
    is_peer_error,
    read_record,
    record_exception,
    shell_exit_code,
    signal_name,
)
from dstrial.launch.local_ranks import run_ranks
from dstrial.launch.rank_main import script_command


def _ending(rank: int, time_s: float, *, is_consequence: bool = False) -> RankEnding:
    return RankEnding(RankFailure(rank, rank, 100 + rank, 1, None, "here", "text"), time_s, is_consequence)


@pytest.mark.parametrize(
    ("endings", "rank"),
    [
        pytest.param([_ending(0, 2.0), _ending(1, 1.0), _ending(2, 3.0)], 1, id="earliest"),
        pytest.param([_ending(0, 1.0, is_consequence=True), _ending(1, 2.0)], 1, id="not a lost peer"),
        pytest.param(
            [_ending(0, 2.0, is_consequence=True), _ending(1, 1.0, is_consequence=True)],
            1,
            id="lost peers only",
        ),
        pytest.param([], None, id="none"),
    ],
)
def test_first_ending_is_earliest_root_cause(endings: list[RankEnding], rank: int | None) -> None:
    ending = first_ending(endings)
    assert (None if ending is None else ending.failure.rank) == rank


def test_record_exception_keeps_first_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    record_exception(ValueError("first"), "its traceback")
    record_exception(ValueError("second"))
    record = read_record(path)
    assert record is not None
    assert (record.summary, record.text) == ("ValueError: first", "its traceback")
    assert [p.name for p in tmp_path.iterdir()] == ["error.json"]


def test_torchrun_error_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback ...", "timestamp": "1700000000"}
    path.write_text(
        json.dumps({"message": {"message": "RuntimeError: Connection closed by peer", "extraInfo": extra}})
    )
    record = read_record(path)
    assert record is not None
    assert record.time_s == 1_700_000_000
    assert is_consequence(record)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"message": {}}', '{"message": {"message": "x", "extraInfo": 1}}']
)
def test_read_record_damaged_file_returns_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(text)
    assert read_record(path) is None
    assert read_record(tmp_path / "absent") is None


def test_signal_exit_codes_follow_shell_convention() -> None:
    assert (shell_exit_code(-9), signal_name(-9)) == (137, "SIGKILL")
    assert (shell_exit_code(3), signal_name(3)) == (3, None)
    killed = RankFailure(2, 0, 7, 137, "SIGKILL", "node1", "")
    assert killed.headline == "rank 2 failed first (killed by SIGKILL, host node1):"
    assert "memory" in killed.describe()


FAILURE = RankFailure(rank=1, local_rank=1, pid=7, exit_code=3, signal_name=None, host="here", error="é\nx")


@pytest.mark.parametrize(
    "outcome",
    [
        LaunchOutcome(0, None, (0, 0), None, ()),
        LaunchOutcome(3, FAILURE, (137, 3), "SIGTERM", (0,), ended_at_once=True),
    ],
)
def test_launch_outcome_survives_json_round_trip(outcome: LaunchOutcome) -> None:
    assert LaunchOutcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


class _Closed(io.StringIO):
    def write(self, _text: str) -> int:
        raise OSError(5, "Input/output error")


def test_launcher_reports_failure_and_survives_closed_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = RankFailure(1, 1, 7, 3, None, "here", "Traceback\nValueError: x")
    outcome = LaunchOutcome(3, failure, (137, 3), None, (0,))
    monkeypatch.setattr(launcher, "_launch", lambda _options: outcome)
    assert launcher.main(["script.py"]) == 3
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "dstrial.launch: rank(s) 0 did not end in time and were killed"
    assert printed[1].startswith("rank 1 failed first (")
    monkeypatch.setattr("sys.stderr", _Closed())
    assert launcher.main(["script.py"]) == 3


# Messages of torch 2.6 to 2.13 about lost peers.
_SAID = (
    "[rank0]:[E1122 10:11:12.0 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, Timeout(ms)=600000) ran for 600081 milliseconds",
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 2. Original reason for failure was: …",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU "
    "operations might run on corrupted/incomplete data.",
)

_SCRIPT = """
import os, sys, time
from pathlib import Path

told = Path({told!r})
if os.environ["RANK"] == "0":
    print({said!r}, file=sys.stderr)
    print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
    for frame in range(60):
        print(f"frame #{{frame}}: c10d::ProcessGroupNCCL::watchdogHandler()", file=sys.stderr)
    sys.stderr.flush()
    told.touch()
    os.abort()
give_up_at_s = time.monotonic() + 60
while not told.exists() and time.monotonic() < give_up_at_s:
    time.sleep(0.01)
raise ValueError("the batch of rank 1 is broken")
"""


@pytest.mark.parametrize("said", _SAID)
def test_nccl_peer_errors_are_recognized(said: str) -> None:
    assert is_peer_error(said)


@pytest.mark.process
def test_failed_rank_is_named_despite_watchdog_abort(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format(told=str(tmp_path / "told"), said=_SAID[0]))
    outcome = run_ranks(script_command([str(script)]), num_ranks=2, log_dir=tmp_path / "logs")
    assert outcome.first_failure is not None
    assert outcome.first_failure.rank == 1, outcome.first_failure.describe()
    assert "the batch of rank 1 is broken" in outcome.first_failure.error
