"""Dump the ranks' Python stacks, and find out for what each rank waits.

A signal requests a dump. Only processes with a handler get the signal, which would end a process without one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dstrial.process_state import catches
from dstrial.ranks.stack_dump import STACKS_SIGNAL

_DUMP_TIMEOUT_S = 5.0
_QUIET_S = 0.15  # a dump is complete when its file has not grown for this time

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[.*\])? \(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')

# If the innermost calls are in these files, the rank waits for other ranks.
_COLLECTIVE = (
    "/torch/distributed/",
    "/deepspeed/comm/",
    "/dstrial/ranks/",
)
# The collective's name is taken from these files first, because wrappers are less specific.
_OPERATIONS = ("/torch/distributed/distributed_c10d.py", "/dstrial/ranks/control_channel.py")
_WRAPPERS = frozenset({"wrapper", "_wait", "wait"})
# ZeRO 3 waits here for C++ handles, which have no Python frames.
_ZERO_GATHERS = "/deepspeed/runtime/zero/partition_parameters.py"
_ZERO_MODULES = "/deepspeed/runtime/zero/partitioned_param_coordinator.py"
_DATA = ("/torch/utils/data/", "/dstrial/loop/data/")
_MASTER = ("/determined/common/api/",)
_REPORT_WRITER = "/dstrial/loop/metric_sinks.py"
_DEVICE = ("/torch/cuda/", "/torch/accelerator/", "/deepspeed/accelerator/")
# These calls wait for the device in C++, without a Python frame: only the source line shows them.
_DEVICE_CALL = re.compile(r"\.(?:item|cpu|tolist|numpy|synchronize|nonzero)\(")
_BACKWARD = "_engine_run_backward"
_OURS = str(Path(__file__).parents[2])
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen", "<string>")
_STANDARD_LIBRARY = re.compile(r"/lib(?:64)?/python3\.\d+/")


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One call on a stack; ``line`` is 0 if unknown."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True, slots=True)
class ThreadStack:
    """The calls of a thread, the most recent one first."""

    thread_id: int
    frames: tuple[Frame, ...]


class Wait(enum.Enum):
    """The kind of operation for which a rank waits, derived from the rank's stack."""

    RANKS = "ranks"
    DATA = "data"
    MASTER = "master"
    DEVICE = "device"
    """The accelerator, which may itself wait for other ranks in an earlier collective."""
    UNKNOWN = "unknown"
    """Other: the rank computes, or waits for something that the stack does not show."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A rank's position in the code, and the operation for which the rank waits.

    ``operation`` is the name of a collective; "" if unknown. ``frame`` is the innermost call of the user's code, else of
    dstrial's code. ``gathers_weights``: whether ZeRO 3 gathers a module's weights in forward or backward.
    """

    wait: Wait
    operation: str = ""
    frame: Frame | None = None
    gathers_weights: bool = False

    @property
    def call(self) -> str:
        """Function, file and line of the frame; empty if unknown."""
        frame = self.frame
        return "" if frame is None else f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})"


def dump_stacks(files: Mapping[int, Path]) -> dict[int, str]:
    """Make processes dump their Python stacks to ``files``; return the texts by pid.

    ``files`` maps a pid to the file to which the process appends its stacks. Waits at most 5 s. Processes that write no stacks,
    or have no handler of the signal, are missing in the result.
    """
    sizes: dict[int, int] = {}
    for pid, path in files.items():
        if catches(pid, STACKS_SIGNAL):
            size = _size(path)
            with contextlib.suppress(OSError):
                os.kill(pid, STACKS_SIGNAL)
                sizes[pid] = size
    deadline_s = time.monotonic() + _DUMP_TIMEOUT_S
    last, grown_at_s = sizes, time.monotonic()
    while sizes and time.monotonic() < deadline_s:
        time.sleep(0.02)
        now = {pid: _size(files[pid]) for pid in sizes}
        if now != last:
            last, grown_at_s = now, time.monotonic()
        if all(now[pid] > sizes[pid] for pid in sizes) and time.monotonic() - grown_at_s >= _QUIET_S:
            break
    found = {}
    for pid, size in sizes.items():
        with contextlib.suppress(OSError):
            found[pid] = files[pid].read_bytes()[size:].decode(errors="replace")
    return {pid: text for pid, text in found.items() if text}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def parse_stacks(text: str) -> list[ThreadStack]:
    """Return the stacks of all threads in one or more dumps of faulthandler."""
    found: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        thread = _THREAD.match(line)
        if thread is not None:
            found.append((int(thread.group(1), 16), []))
            continue
        frame = _FRAME.match(line)
        if frame is not None and found:
            number = int(frame.group(2)) if frame.group(2).isdigit() else 0
            found[-1][1].append(Frame(frame.group(1), number, frame.group(3)))
    return [ThreadStack(thread_id, tuple(frames)) for thread_id, frames in found]


def stack_of(stacks: Sequence[ThreadStack], thread_id: int) -> ThreadStack | None:
    """Return the stack of a thread, else of the oldest thread; None without stacks."""
    for stack in reversed(stacks):
        if stack.thread_id == thread_id:
            return stack
    return stacks[-1] if stacks else None


def place_of(
    stacks: Sequence[ThreadStack],
    thread_id: int,
    source_line: Callable[[str, int], str] = lambda _file, _line: "",
) -> Place | None:
    """Return a thread's position and wait, from the stacks of all threads of a rank.

    ``source_line(file, line)`` returns a line's text, from which waits for the device are recognised; the default recognises
    none of these. Returns None if the thread has no stack.
    """
    stack = stack_of(stacks, thread_id)
    if stack is None or not stack.frames:
        return None
    wait, operation = _wait_of(stack.frames)
    others = [other.frames for other in stacks if other is not stack]
    if wait is Wait.UNKNOWN and any(frame.function == _BACKWARD for frame in stack.frames[:3]):
        # On an accelerator, hooks of the backward pass run in autograd's C++ threads.
        for frames in others:
            found = _wait_of(frames)
            if found[0] is Wait.RANKS and not _has(frames, "threading.py", "_bootstrap_inner"):
                wait, operation = found
    if wait is Wait.UNKNOWN and _has(stack.frames, _REPORT_WRITER):
        # The thread waits for the report writer, which may itself wait for the master.
        for frames in others:
            if _has(frames, _REPORT_WRITER, "_run"):
                wait, operation = _wait_of(frames)
    if wait is Wait.UNKNOWN and _DEVICE_CALL.search(source_line(stack.frames[0].file, stack.frames[0].line)):
        wait = Wait.DEVICE
    frame = next(filter(_is_users, stack.frames), None) or next(filter(_is_ours, stack.frames), None)
    return Place(wait, operation, frame, gathers_weights=_has(stack.frames, _ZERO_MODULES))


def _wait_of(frames: Sequence[Frame]) -> tuple[Wait, str]:
    """Return (kind of wait, name of the collective or "") of calls, most recent first."""
    num_inner = next((idx for idx, frame in enumerate(frames) if _is_users(frame)), len(frames))
    inner = frames[:num_inner]
    if _has(inner[:2], _ZERO_GATHERS, "wait"):
        return Wait.RANKS, "all_gather"
    for frame in inner:
        if _is_in(frame, _COLLECTIVE):
            return Wait.RANKS, _operation(inner)
        if _is_in(frame, _MASTER):
            return Wait.MASTER, ""
        if _is_in(frame, _DATA):
            return Wait.DATA, ""
    # User code of a data set: the loader calls it in the rank itself, without workers.
    if any(_is_in(frame, _DATA) for frame in frames[: num_inner + 12]):
        return Wait.DATA, ""
    if any(_is_in(frame, _DEVICE) for frame in inner):
        return Wait.DEVICE, ""
    return Wait.UNKNOWN, ""


def _operation(frames: Sequence[Frame]) -> str:
    for files in (_OPERATIONS, _COLLECTIVE):
        for frame in frames:
            if _is_in(frame, files) and frame.function not in _WRAPPERS:
                return frame.function.lstrip("_")
    return ""


def _has(frames: Sequence[Frame], file: str, function: str = "") -> bool:
    return any(frame.file.endswith(file) and function in ("", frame.function) for frame in frames)


def _is_in(frame: Frame, files: Sequence[str]) -> bool:
    return any(part in frame.file for part in files)


def _is_users(frame: Frame) -> bool:
    is_library = _is_in(frame, _LIBRARIES) or _STANDARD_LIBRARY.search(frame.file)
    return not (is_library or f"{_OURS}/" in frame.file)


def _is_ours(frame: Frame) -> bool:
    return f"{_OURS}/" in frame.file and not _is_in(frame, _COLLECTIVE)
