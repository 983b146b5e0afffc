"""Write this rank's heartbeat (phase and batch) to a file that the launcher reads.

Rank and launcher map the file into memory, and use neither locks nor system calls. Without dstrial's launcher the rank writes to
private memory. The file has one slot of ``SLOT_BYTES`` for each rank of this machine.
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

# A slot is 16 words of eight bytes in native byte order. Times are from CLOCK_MONOTONIC.
SLOT_BYTES = 128
_PHASE, _BATCH, _SINCE, _THREAD, _PID, _TICKS = range(6)
_LONGEST = 8  # index of the first of several words: the longest duration of each phase


class Phase(enum.IntEnum):
    """Current activity of a rank's main thread."""

    NONE = 0
    """Unknown activity: start, script or end."""
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
    """A heartbeat: the last state that a rank's main thread has written.

    Attributes:
        phase: current activity of the thread.
        batch: number of trained batches.
        since_s: start time of the phase or of the latest batch, monotonic.
        thread_id: Python's id of the thread.
        pid: process id of the rank.
        start_ticks: start time of the process, in the kernel's ticks.
        longest_s: by ``Phase``, the longest duration so far; 0 if none has ended.
    """

    phase: Phase
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
        """Record the start of the batch that follows ``batch`` trained batches."""
        self.begin(Phase.BATCH, batch)

    @property
    def phase(self) -> Phase:
        return Phase(self._integers[_PHASE])

    @contextlib.contextmanager
    def during(self, phase: Phase, batch: int) -> Iterator[None]:
        """Record ``phase`` during the block, and ``BETWEEN`` after it unless it raises."""
        self.begin(phase, batch)
        yield
        self.begin(Phase.BETWEEN, batch)

    def end(self, phase: Phase = Phase.NONE) -> None:
        """Record phase ``NONE`` or ``LEAVING``, without changing the number of batches."""
        self.begin(phase, self._integers[_BATCH])

    def begin(self, phase: Phase, batch: int) -> None:
        """Record that the main thread enters a phase, after ``batch`` trained batches."""
        now_s = time.monotonic()
        longest = _LONGEST + self._integers[_PHASE]
        self._seconds[longest] = max(self._seconds[longest], now_s - self._seconds[_SINCE])
        # Order matters: a concurrent reader may see the old batch with the new time, never the new batch with the old time.
        self._seconds[_SINCE] = now_s
        self._integers[_BATCH] = batch
        self._integers[_THREAD] = threading.get_ident()
        self._integers[_PHASE] = phase


def heartbeat() -> Heartbeat:
    """Return this process's heartbeat, a singleton. Ranks: any; no communication."""
    return _opened(os.environ.get(HEARTBEAT_VARIABLE, ""), os.getpid())


def leave() -> None:
    """Record in the heartbeat that this rank's program has ended.

    A no-op if this process has never called :func:`heartbeat`.
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


def read_beat(buffer: mmap.mmap | bytearray, slot: int) -> Beat | None:
    """Return the heartbeat of local rank ``slot``; None if it has not written yet."""
    words = memoryview(bytes(_slot(buffer, slot)))
    integers, seconds = words.cast("q"), words.cast("d")
    if not integers[_PID]:
        return None
    return Beat(
        phase=Phase(integers[_PHASE]),
        batch=integers[_BATCH],
        since_s=seconds[_SINCE],
        thread_id=integers[_THREAD],
        pid=integers[_PID],
        start_ticks=integers[_TICKS],
        longest_s=(0.0, *seconds[_LONGEST + 1 : _LONGEST + len(Phase)]),
    )
