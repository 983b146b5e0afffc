"""A rank aborted by NCCL's watchdog is not reported as the first failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.launch.failures import is_peer_error
from dstrial.launch.local_ranks import run_ranks
from dstrial.launch.rank_main import script_command

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
