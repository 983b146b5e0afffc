"""Find in a rank's faulthandler stacks what the rank waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.launch.stalls.stacks import (
    Frame,
    Wait,
    parse_stacks,
    place_of,
    stack_of,
)
from dstrial.process_state import catches, read_state
from dstrial.ranks.stack_dump import STACKS_FILE_VARIABLE, STACKS_SIGNAL

SITE = "/env/lib/python3.12/site-packages"
HEAD = "Thread 0x00007f01 (most recent call first):\n"


def dump(*frames: str, head: str = HEAD) -> str:
    lines = []
    for frame in frames:
        file, _, rest = frame.partition(":")
        line, _, function = rest.partition(" ")
        lines.append(f'  File "{file}", line {line} in {function}\n')
    return head + "".join(lines)


BARRIER = (
    f"{SITE}/torch/distributed/distributed_c10d.py:4820 barrier",
    f"{SITE}/torch/distributed/c10d_logger.py:83 wrapper",
    "/home/me/model_def.py:31 train_batch",
    f"{SITE}/dstrial/loop/loop.py:360 _train",
)
WRAPPED_REDUCE = (
    f"{SITE}/torch/distributed/distributed_c10d.py:2810 all_reduce",
    f"{SITE}/torch/distributed/c10d_logger.py:83 wrapper",
    f"{SITE}/deepspeed/comm/torch.py:160 all_reduce",
    f"{SITE}/deepspeed/comm/comm.py:116 log_wrapper",
    f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:1200 allreduce_and_scatter",
    f"{SITE}/torch/autograd/graph.py:841 _engine_run_backward",
    "/home/me/model_def.py:40 train_batch",
)
GATHER = (
    f"{SITE}/deepspeed/runtime/zero/partition_parameters.py:120 wait",
    f"{SITE}/deepspeed/utils/nvtx.py:20 wrapped_fn",
    f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py:300 fetch_sub_module",
    "/home/me/model_def.py:31 train_batch",
)
OTHER = "Thread 0x00007f03 [other] (most recent call first):\n"
TRAINS = "/home/me/model_def.py:40 train_batch"
BACKWARD = (f"{SITE}/torch/autograd/graph.py:841 _engine_run_backward", TRAINS)
THREADING = "/usr/lib/python3.12/threading.py:1075 _bootstrap_inner"
SENDS = (
    "/usr/lib/python3.12/ssl.py:1166 read",
    f"{SITE}/determined/common/api/_session.py:120 _do_request",
    f"{SITE}/dstrial/loop/metric_sinks.py:227 _run",
)
FLUSHES = (
    "/usr/lib/python3.12/threading.py:359 wait",
    f"{SITE}/dstrial/loop/metric_sinks.py:260 flush",
    f"{SITE}/dstrial/loop/loop.py:360 _train",
)
LOADER = f"{SITE}/torch/utils/data/dataloader.py:1275 _try_get_data"
FETCH = f"{SITE}/torch/utils/data/_utils/fetch.py:54 fetch"
RECORDS = "/home/me/records.py:12 __getitem__"
LINES = {
    ("/home/me/model_def.py", 45): "        total += loss.item()\n",
    (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 1900): "return bool(overflow.item())",
    ("/home/me/model_def.py", 47): "        items = self.items()\n",
}
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Wait, str]] = {
    # name: calls of the training thread, calls of another thread, wait, collective
    "collective": (BARRIER, (), Wait.RANKS, "barrier"),
    "collective below wrappers": (WRAPPED_REDUCE, (), Wait.RANKS, "all_reduce"),
    "collective of a backward hook": (BACKWARD, BARRIER, Wait.RANKS, "barrier"),
    "gather of ZeRO 3": (GATHER, (), Wait.RANKS, "all_gather"),
    "background save": ((TRAINS,), (*BARRIER[:2], THREADING), Wait.UNKNOWN, ""),
    "flush of reports": (FLUSHES, SENDS, Wait.MASTER, ""),
    "reports beside training": ((TRAINS,), SENDS, Wait.UNKNOWN, ""),
    "loader": ((LOADER, f"{SITE}/dstrial/loop/data/training.py:40 __next__", TRAINS), (), Wait.DATA, ""),
    "data set in the rank": ((RECORDS, FETCH, TRAINS), (), Wait.DATA, ""),
    "read of a data set": (
        ("/usr/lib/python3.12/socket.py:720 readinto", RECORDS, FETCH, TRAINS),
        (),
        Wait.DATA,
        "",
    ),
    "synchronize": ((f"{SITE}/torch/cuda/__init__.py:1040 synchronize", TRAINS), (), Wait.DEVICE, ""),
    "item of the user": (("/home/me/model_def.py:45 train_batch",), (), Wait.DEVICE, ""),
    "item of DeepSpeed": (
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:1900 has_overflow", TRAINS),
        (),
        Wait.DEVICE,
        "",
    ),
    "collective that synchronizes": (
        (f"{SITE}/torch/cuda/streams.py:100 synchronize", *BARRIER),
        (),
        Wait.RANKS,
        "barrier",
    ),
    "items of a dictionary": (("/home/me/model_def.py:47 train_batch",), (), Wait.UNKNOWN, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_wait_is_found_in_stacks(case: str) -> None:
    frames, others, wait, operation = CASES[case]
    text = dump(*others, head=OTHER) + dump(*frames)
    place = place_of(parse_stacks(text), 0x7F01, lambda file, line: LINES.get((file, line), ""))
    assert place is not None
    assert (place.wait, place.operation) == (wait, operation)
    assert place.gathers_weights == (frames is GATHER)
    if TRAINS in frames and RECORDS not in frames:
        assert place.call == "train_batch (model_def.py:40)"


def test_invalid_stack_dump_has_no_place() -> None:
    assert parse_stacks("Fatal Python error\n  nothing") == []
    assert place_of([], 1) is None
    assert stack_of([], 1) is None
    stacks = parse_stacks(dump("/a.py:??? f", head="Current thread 0x1 (most recent call first):\n"))
    assert stacks[0].frames == (Frame("/a.py", 0, "f"),)


PROGRAM = """
import sys, threading, time
from dstrial.ranks.stack_dump import dump_stacks_on_signal
dump_stacks_on_signal()
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.process
def test_signal_dumps_stacks_without_ending_blocked_rank(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    env = {**os.environ, STACKS_FILE_VARIABLE: str(path)}
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert catches(process.pid, STACKS_SIGNAL)
            assert not catches(process.pid, signal.SIGUSR2)
            for time in range(1, 3):
                os.kill(process.pid, STACKS_SIGNAL)
                wait_for(lambda time=time: path.read_text().count("in <module>") == time)  # type: ignore[misc]
            stack = stack_of(parse_stacks(path.read_text()), 0)
            assert stack is not None
            assert stack.frames[-1].function == "<module>"
            assert process.poll() is None
            os.kill(process.pid, signal.SIGSTOP)
            wait_for(lambda: getattr(read_state(process.pid), "is_stopped", False))
        finally:
            process.kill()
