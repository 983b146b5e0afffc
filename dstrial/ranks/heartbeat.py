"""Write this rank's heartbeat (phase and batch) to a file that the launcher reads.

Rank and launcher map the file into memory, and use neither locks nor system calls. Without dstrial's launcher the rank writes to
private memory. The file has one slot of ``SLOT_BYTES`` for each rank of this machine. A slot has a *lane* (the state of one
thread) for the main thread and one for the background save thread, the rank's pid, and the longest duration of each phase. The
hot path writes through memory views: fewer cache misses than ``struct``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dstrial.process_state import start_ticks

HEARTBEAT_VARIABLE = "DSTRIAL_HEARTBEAT"
"""Environment variable with a rank's slot index and the heartbeat file, as ``SLOT:PATH``."""

# A slot is 32 words of eight bytes in native byte order. Times are from CLOCK_MONOTONIC.
SLOT_BYTES = 256
_PHASE, _WAITS, _BATCH, _SINCE, _THREAD = range(5)  # words of a lane
MAIN_LANE, SAVE_LANE = 0, 8
_PID, _TICKS = 16, 17
_LONGEST = 24


class Phase(enum.IntEnum):
    """Current activity of a rank's thread."""

    NONE = 0
    """Unknown activity: start, script or end. In the save lane: no save is running."""
    BATCH = 1
    BETWEEN = 2
    """Exchanges and reports between batches."""
    VALIDATION = 3
    SAVE = 4
    CALLBACK = 5
    """A user's callback, between batches."""
    SCRIPT = 6
    """User code between two batches, of any duration."""
    LEAVING = 7
    """The program has ended, but threads or exit handlers still run."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat: the last state that a rank's main or save thread has written.

    Attributes:
        phase: current activity of the thread.
        waits_for_data: whether the main thread waits for its data loader.
        batch: number of trained batches.
        since_s: start time of the phase or of the latest batch, monotonic.
        thread_id: Python's id of the thread.
        pid: process id of the rank.
        start_ticks: start time of the process, in the kernel's ticks.
        longest_s: by ``Phase``, the longest duration so far; 0 if none has ended. Of consecutive batches only the last is timed.
    """

    phase: Phase
    waits_for_data: bool
    batch: int
    since_s: float
    thread_id: int
    pid: int
    start_ticks: int
    longest_s: tuple[float, ...]


class Heartbeat:
    """Writes heartbeats to this rank's slot of a shared file, or to private memory."""

    def __init__(self, slot: memoryview | None = None) -> None:
        words = memoryview(bytearray(SLOT_BYTES)) if slot is None else slot
        self._integers = words.cast("q")
        self._seconds = words.cast("d")

    def begin_batch(self, batch: int) -> None:
        """Record the start of the batch that follows ``batch`` trained batches. Hot path."""
        # Order matters: a concurrent reader may see the old batch with the new time, never the new batch with the old time.
        self._seconds[_SINCE] = time.monotonic()
        self._integers[_BATCH] = batch
        self._integers[_PHASE] = 1

    def await_data(self) -> None:
        """Record that the main thread waits for its data loader. Hot path."""
        self._integers[_WAITS] = 1

    def end_wait(self) -> None:
        """Record the end of the wait for the data loader. Hot path."""
        self._integers[_WAITS] = 0

    def begin(self, phase: Phase, batch: int) -> None:
        """Record that the main thread enters a phase, after ``batch`` trained batches."""
        self._begin(MAIN_LANE, phase, batch)

    @property
    def phase(self) -> Phase:
        return Phase(self._integers[_PHASE])

    @contextlib.contextmanager
    def during(self, phase: Phase, batch: int) -> Iterator[None]:
        """Record ``phase`` during the block, and ``BETWEEN`` after it unless it raises."""
        self.begin(phase, batch)
        yield
        self.begin(Phase.BETWEEN, batch)

    def begin_save(self, batch: int) -> None:
        """Record that this thread starts to save the checkpoint of batch ``batch``."""
        self._begin(SAVE_LANE, Phase.SAVE, batch)

    def end_save(self) -> None:
        self._begin(SAVE_LANE, Phase.NONE, self._integers[SAVE_LANE + _BATCH])

    def end(self, phase: Phase = Phase.NONE) -> None:
        """Record the phase ``NONE`` or ``LEAVING``; keep the number of trained batches."""
        self.begin(phase, self._integers[_BATCH])

    def _begin(self, lane: int, phase: Phase, batch: int) -> None:
        now_s = time.monotonic()
        longest = _LONGEST + self._integers[lane + _PHASE]
        self._seconds[longest] = max(self._seconds[longest], now_s - self._seconds[lane + _SINCE])
        self._seconds[lane + _SINCE] = now_s
        self._integers[lane + _BATCH] = batch
        self._integers[lane + _WAITS] = 0
        self._integers[lane + _THREAD] = threading.get_ident()
        self._integers[lane + _PHASE] = phase


def heartbeat() -> Heartbeat:
    """Return this process's heartbeat, a singleton. Ranks: any; no communication."""
    return _opened(os.environ.get(HEARTBEAT_VARIABLE, ""), os.getpid())


def leave() -> None:
    """Record in the heartbeat that this rank's program has ended.

    A no-op if the rank has not trained.
    """
    if _opened.cache_info().currsize:
        heartbeat().end(Phase.LEAVING)


@functools.lru_cache(maxsize=1)
def _opened(named: str, pid: int) -> Heartbeat:
    slot, separator, path = named.partition(":")
    if not separator:
        return Heartbeat()
    try:
        with Path(path).open("r+b") as file:
            words = _slot(mmap.mmap(file.fileno(), 0), int(slot))
    except (OSError, ValueError):  # the launcher was killed and its directory deleted
        return Heartbeat()
    integers = words.cast("q")
    # Child processes inherit the environment variable, but must not write to the rank's slot.
    if integers[_PID] not in (0, pid) and start_ticks(integers[_PID]) == integers[_TICKS]:
        return Heartbeat()
    integers[_THREAD] = threading.main_thread().ident or 0
    integers[_TICKS] = start_ticks(pid) or 0
    integers[_PID] = pid
    return Heartbeat(words)


def _slot(buffer: mmap.mmap | bytearray, slot: int) -> memoryview:
    return memoryview(buffer)[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]


def make_heartbeat_file(path: Path, num_slots: int) -> mmap.mmap:
    # Write the zeros: on a full disk, a write to a mapped page that is not allocated raises SIGBUS.
    path.write_bytes(bytes(num_slots * SLOT_BYTES))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def read_beat(buffer: mmap.mmap | bytearray, slot: int, lane: int = MAIN_LANE) -> Beat | None:
    """Return a rank's heartbeat; None if the rank has not written yet.

    ``slot`` is the local rank; ``lane`` selects the main or the save thread.
    """
    words = memoryview(bytes(_slot(buffer, slot)))
    integers, seconds = words.cast("q"), words.cast("d")
    if not integers[_PID]:
        return None
    return Beat(
        phase=Phase(integers[lane + _PHASE]),
        waits_for_data=bool(integers[lane + _WAITS]),
        batch=integers[lane + _BATCH],
        since_s=seconds[lane + _SINCE],
        thread_id=integers[lane + _THREAD],
        pid=integers[_PID],
        start_ticks=integers[_TICKS],
        longest_s=(0.0, *seconds[_LONGEST + 1 : _LONGEST + len(Phase)]),
    )
