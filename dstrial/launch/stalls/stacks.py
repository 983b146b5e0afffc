"""Reads what faulthandler has written of a rank, and says where the rank is.

Pure: texts in, values out. The source line of a call is asked of who has it.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-fA-F]+)(?: \[.*\])? \(most recent call first\):")
_NAME = re.compile(r"^Thread 0x([0-9a-fA-F]+) is named (.*)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')

# Whatever of these is innermost waits for other ranks.
_COLLECTIVE = (
    "/torch/distributed/",
    "/deepspeed/comm/",
    "/dstrial/ranks/",
)
# Names of collectives are taken from here; what wraps them says less.
_OPERATIONS = ("/torch/distributed/distributed_c10d.py", "/dstrial/ranks/control_channel.py")
# ZeRO 3 waits here for handles of C++, which have no calls of their own in a stack.
_ZERO_GATHERS = "/deepspeed/runtime/zero/partition_parameters.py"
_DATA = ("/torch/utils/data/", "/dstrial/loop/data/")
_MASTER = ("/determined/common/api/",)
_SAVES = "/dstrial/loop/background_save.py"
_WRITES = "/dstrial/loop/report_writer.py"
_FETCHES = ("/torch/utils/data/_utils/fetch.py",)
_DEVICE = ("/torch/cuda/", "/torch/accelerator/", "/deepspeed/accelerator/")
# These are written in C++ and so have no call of their own in a stack: only the line that calls them tells. On the CPU they take
# no time in which they could be met.
_DEVICE_CALL = re.compile(r"\.(?:item|cpu|tolist|numpy|synchronize|nonzero)\(")
_BACKWARD = "_engine_run_backward"
_OURS = str(Path(__file__).parents[2])
_LIBRARIES = ("/site-packages/", "/dist-packages/", "<frozen", "<string>")
_STANDARD_LIBRARY = re.compile(r"/lib(?:64)?/python3\.\d+/")
_WRAPPERS = frozenset({"wrapper", "_wait", "wait"})


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One call; ``line`` is 0 where Python does not know it."""

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
    """What a rank waits for, as far as its stack tells."""

    RANKS = "ranks"
    DATA = "data"
    MASTER = "master"
    DEVICE = "device"
    """Its accelerator: that may itself wait for other ranks, in a collective that was started before."""
    UNKNOWN = "unknown"
    """Nothing of the above: it works, or waits for what only its code knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and what it waits for.

    ``user_frame`` is the innermost call of the user's code, of the loader worker ``worker_pid`` where that is not 0.
    """

    wait: Wait
    operation: str = ""
    user_frame: Frame | None = None
    worker_pid: int = 0

    @property
    def user_call(self) -> str:
        """The innermost call of the user's code as people name it; empty without one."""
        frame = self.user_frame
        return "" if frame is None else f"{frame.function} ({frame.file.rpartition('/')[2]}:{frame.line})"


def parse_stacks(text: str) -> list[ThreadStack]:
    """Read one or more dumps of faulthandler; of several, all threads in a row."""
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


def thread_names(text: str) -> dict[int, str]:
    """Return the threads that keep a process from ending, as it has named them."""
    return {int(number, 16): name for number, name in _NAME.findall(text)}


def main_stack(stacks: Sequence[ThreadStack], thread_id: int) -> ThreadStack | None:
    """Return the main thread's calls; the last of a dump is the oldest thread."""
    for stack in reversed(stacks):
        if stack.thread_id == thread_id:
            return stack
    return stacks[-1] if stacks else None


def _no_line(_file: str, _line: int) -> str:
    return ""


def place_of(
    stacks: Sequence[ThreadStack], thread_id: int, line_of: Callable[[str, int], str] = _no_line
) -> Place | None:
    """Return where a rank is by its threads' stacks; ``line_of`` reads a source line."""
    stack = main_stack(stacks, thread_id)
    if stack is None or not stack.frames:
        return None
    user_frame = next((frame for frame in stack.frames if _is_users(frame)), None)
    wait, operation = _wait_of(stack.frames)
    if wait is Wait.UNKNOWN and any(frame.function == _BACKWARD for frame in stack.frames[:3]):
        # Hooks of a backward pass on an accelerator run in threads of autograd's.
        for other in stacks:
            if other is stack:
                continue
            other_wait, other_operation = _wait_of(other.frames)
            if other_wait is Wait.RANKS and not _is_background(other.frames):
                wait, operation = other_wait, other_operation
    if wait is Wait.UNKNOWN and any(frame.file.endswith(_WRITES) for frame in stack.frames):
        # It waits for the thread that writes its reports, which may wait for the master.
        for other in stacks:
            if any(frame.file.endswith(_WRITES) and frame.function == "_run" for frame in other.frames):
                wait, operation = _wait_of(other.frames)
    if wait is Wait.UNKNOWN and _DEVICE_CALL.search(line_of(stack.frames[0].file, stack.frames[0].line)):
        wait = Wait.DEVICE
    return Place(wait, operation, user_frame)


def saving_stack(stacks: Sequence[ThreadStack]) -> ThreadStack | None:
    """Return the calls of the thread that saves in the background; None without one."""
    for stack in stacks:
        if any(frame.file.endswith(_SAVES) and frame.function == "run" for frame in stack.frames):
            return stack
    return None


def place_of_save(stacks: Sequence[ThreadStack]) -> Place | None:
    """Return where a rank's save in the background is; its call may be dstrial's."""
    stack = saving_stack(stacks)
    if stack is None:
        return None
    wait, operation = _wait_of(stack.frames)
    return Place(wait, operation, next((frame for frame in stack.frames if not _is_of_library(frame)), None))


def place_in_worker(place: Place, workers: Mapping[int, Sequence[ThreadStack]]) -> Place:
    """Return the place of a rank that waits for data, with the worker that reads."""
    for pid, stacks in workers.items():
        # The main thread of a worker: the one that reads, where others are the libraries'.
        for stack in reversed(stacks):
            if not any(part in frame.file for frame in stack.frames for part in _FETCHES):
                continue
            user_frame = next((frame for frame in stack.frames if _is_users(frame)), None)
            return dataclasses.replace(place, user_frame=user_frame, worker_pid=pid)
    return place


def _wait_of(frames: Sequence[Frame]) -> tuple[Wait, str]:
    """Say what the innermost calls wait for, up to the user's own."""
    inner: list[Frame] = []
    for frame in frames:
        if _is_users(frame):
            break
        inner.append(frame)
    if any(frame.function == "wait" and frame.file.endswith(_ZERO_GATHERS) for frame in inner[:2]):
        return Wait.RANKS, "all_gather"
    # The data first: a loader's worker processes and threads are asked through no module of torch.distributed.
    for frame in inner:
        if any(part in frame.file for part in _COLLECTIVE):
            return Wait.RANKS, _operation(inner)
        if any(part in frame.file for part in _MASTER):
            return Wait.MASTER, ""
        if any(part in frame.file for part in _DATA):
            return Wait.DATA, ""
    # User code inside a data set, which the loader has called in the rank itself.
    if any("/torch/utils/data/" in frame.file for frame in frames[: len(inner) + 12]):
        return Wait.DATA, ""
    if any(part in frame.file for frame in inner for part in _DEVICE):
        return Wait.DEVICE, ""
    return Wait.UNKNOWN, ""


def _operation(frames: Sequence[Frame]) -> str:
    named = [
        frame.function
        for frame in frames
        if any(part in frame.file for part in _OPERATIONS) and frame.function not in _WRAPPERS
    ]
    if named:
        return named[0].lstrip("_")
    others = [
        frame.function
        for frame in frames
        if any(part in frame.file for part in _COLLECTIVE) and frame.function not in _WRAPPERS
    ]
    return others[0].lstrip("_") if others else ""


def _is_background(frames: Sequence[Frame]) -> bool:
    return any(frame.function == "_bootstrap_inner" for frame in frames)


def _is_users(frame: Frame) -> bool:
    return not (_is_of_library(frame) or f"{_OURS}/" in frame.file)


def _is_of_library(frame: Frame) -> bool:
    return any(part in frame.file for part in _LIBRARIES) or bool(_STANDARD_LIBRARY.search(frame.file))
