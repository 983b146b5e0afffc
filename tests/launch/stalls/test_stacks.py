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
WORKER = dump(
    "/usr/lib/python3.12/threading.py:359 wait", head="Thread 0x00007f02 [worker] (most recent call first):\n"
)


def test_collective_is_found_with_operation_and_user_call() -> None:
    place = place_of(parse_stacks(WORKER + dump(*BARRIER)), 0x7F01)
    assert place is not None
    assert (place.wait, place.operation) == (Wait.RANKS, "barrier")
    assert place.call == "train_batch (model_def.py:31)"


def test_collective_wrapper_frames_are_ignored() -> None:
    reduce = (
        f"{SITE}/torch/distributed/distributed_c10d.py:2810 all_reduce",
        f"{SITE}/torch/distributed/c10d_logger.py:83 wrapper",
        f"{SITE}/deepspeed/comm/torch.py:160 all_reduce",
        f"{SITE}/deepspeed/comm/comm.py:116 log_wrapper",
        f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:1200 allreduce_and_scatter",
        f"{SITE}/torch/autograd/graph.py:841 _engine_run_backward",
        "/home/me/model_def.py:40 train_batch",
    )
    place = place_of(parse_stacks(dump(*reduce)), 0x7F01)
    assert place is not None
    assert (place.wait, place.operation, place.call) == (
        Wait.RANKS,
        "all_reduce",
        "train_batch (model_def.py:40)",
    )


def test_collective_in_backward_thread_counts_as_rank_wait() -> None:
    backward = dump(
        f"{SITE}/torch/autograd/graph.py:841 _engine_run_backward", "/home/me/model_def.py:40 train_batch"
    )
    hook = dump(BARRIER[0], head="Thread 0x00007f03 (most recent call first):\n")
    place = place_of(parse_stacks(hook + backward), 0x7F01)
    assert place is not None
    assert place.wait is Wait.RANKS


def test_report_flush_takes_wait_of_writer_thread() -> None:
    writer = dump(
        "/usr/lib/python3.12/ssl.py:1166 read",
        f"{SITE}/determined/common/api/_session.py:120 _do_request",
        f"{SITE}/dstrial/loop/metric_sinks.py:227 _run",
        "/usr/lib/python3.12/threading.py:1012 run",
        head="Thread 0x00007f03 (most recent call first):\n",
    )
    flush = dump(
        "/usr/lib/python3.12/threading.py:359 wait",
        f"{SITE}/dstrial/loop/metric_sinks.py:260 flush",
        f"{SITE}/dstrial/loop/loop.py:360 _train",
    )
    place = place_of(parse_stacks(writer + flush), 0x7F01)
    assert place is not None
    assert place.wait is Wait.MASTER

    training = dump("/home/me/model_def.py:40 train_batch", f"{SITE}/dstrial/loop/loop.py:360 _train")
    place = place_of(parse_stacks(writer + training), 0x7F01)
    assert place is not None
    assert place.wait is Wait.UNKNOWN


def test_background_save_is_not_wait_of_training() -> None:
    save = dump(
        *BARRIER[:2],
        "/usr/lib/python3.12/threading.py:1012 run",
        "/usr/lib/python3.12/threading.py:1075 _bootstrap_inner",
        head="Thread 0x00007f03 (most recent call first):\n",
    )
    place = place_of(parse_stacks(save + dump("/home/me/model_def.py:40 train_batch")), 0x7F01)
    assert place is not None
    assert place.wait is Wait.UNKNOWN


@pytest.mark.parametrize(
    "frames",
    [
        (
            f"{SITE}/torch/utils/data/dataloader.py:1275 _try_get_data",
            f"{SITE}/dstrial/loop/data/training.py:40 __next__",
        ),
        ("/home/me/records.py:12 __getitem__", f"{SITE}/torch/utils/data/_utils/fetch.py:54 fetch"),
        (
            "/usr/lib/python3.12/socket.py:720 readinto",
            "/home/me/records.py:12 read",
            f"{SITE}/torch/utils/data/_utils/fetch.py:54 fetch",
        ),
    ],
)
def test_loader_frames_are_wait_for_data(frames: tuple[str, ...]) -> None:
    place = place_of(parse_stacks(dump(*frames, "/home/me/model_def.py:30 train_batch")), 0x7F01)
    assert place is not None
    assert place.wait is Wait.DATA


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


SYNCHRONIZE = dump(
    f"{SITE}/torch/cuda/__init__.py:1040 synchronize",
    f"{SITE}/deepspeed/accelerator/cuda_accelerator.py:80 synchronize",
    "/home/me/model_def.py:44 train_batch",
)
ITEM = dump("/home/me/model_def.py:45 train_batch", f"{SITE}/dstrial/loop/loop.py:360 _train")
OVERFLOW = dump(
    f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:1900 has_overflow",
    "/home/me/model_def.py:46 train_batch",
)
LINES = {
    ("/home/me/model_def.py", 45): "        total += loss.item()\n",
    (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", 1900): "return bool(overflow.item())",
    ("/home/me/model_def.py", 47): "        items = self.items()\n",
}


def line_of(file: str, line: int) -> str:
    return LINES.get((file, line), "")


@pytest.mark.parametrize("text", [SYNCHRONIZE, ITEM, OVERFLOW])
def test_reading_device_value_is_wait_for_device(text: str) -> None:
    place = place_of(parse_stacks(text), 0x7F01, line_of)
    assert place is not None
    assert place.wait is Wait.DEVICE
    assert place.call.startswith("train_batch (model_def.py:4")


def test_collective_takes_precedence_over_device_synchronization() -> None:
    """Other source lines, such as `self.items()`, are no wait for a device."""
    both = dump(f"{SITE}/torch/cuda/streams.py:100 synchronize", *BARRIER)
    place = place_of(parse_stacks(both), 0x7F01, line_of)
    assert place is not None
    assert (place.wait, place.operation) == (Wait.RANKS, "barrier")
    for number in (47, 48):
        place = place_of(parse_stacks(dump(f"/home/me/model_def.py:{number} train_batch")), 0x7F01, line_of)
        assert place is not None
        assert place.wait is Wait.UNKNOWN


def test_zero3_weight_gather_is_recognized() -> None:
    gather = (
        f"{SITE}/deepspeed/runtime/zero/partition_parameters.py:120 wait",
        f"{SITE}/deepspeed/utils/nvtx.py:20 wrapped_fn",
        f"{SITE}/deepspeed/runtime/zero/partitioned_param_coordinator.py:300 fetch_sub_module",
        "/home/me/model_def.py:31 forward",
    )
    for frames, is_gather in ((gather, True), (BARRIER, False)):
        place = place_of(parse_stacks(dump(*frames)), 0x7F01)
        assert place is not None
        assert (place.wait, place.gathers_weights) == (Wait.RANKS, is_gather)
