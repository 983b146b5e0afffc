"""Where this rank is in training, in a file that its launcher has mapped as well.

A rank writes and the launcher reads: no lock, no system call. Without a launcher of ours the rank writes into private memory.
The file has one slot of ``SLOT_BYTES`` for each rank of this machine: a lane for the main thread, a lane for the thread that
saves in the background, the owner, and the longest duration of each phase.

A beat costs cache misses rather than instructions, because a training step fills the caches: the hot path stores through views,
which touch half as much memory as ``struct`` does.
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
"""Environment variable with the slot of a rank and the file, as ``SLOT:PATH``."""

# A slot is 32 words of eight bytes in the machine's order. Times are of CLOCK_MONOTONIC.
SLOT_BYTES = 256
_PHASE, _WAITS, _BATCH, _SINCE, _THREAD = range(5)  # of a lane
MAIN_LANE, SAVE_LANE = 0, 8
_PID, _TICKS = 16, 17
_LONGEST = 24


class Phase(enum.IntEnum):
    """What a lane's thread does."""

    NONE = 0
    """Unknown: a start, a script, the end; of the save lane: no save."""
    BATCH = 1
    BETWEEN = 2
    """Exchanges and reports between batches."""
    VALIDATION = 3
    SAVE = 4
    CALLBACK = 5
    """A callback of the user's, between batches."""
    SCRIPT = 6
    """User code between two batches; it may take any time."""
    LEAVING = 7
    """The program has ended; threads and exit handlers keep the process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """One lane of a slot.

    ``since_s`` is when the phase began; of batches, when the latest one began. ``longest_s`` has the longest duration so far of
    each phase (0: none has ended); of consecutive batches only the last one is measured.
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
    """Writes this rank's slot; private memory without one."""

    def __init__(self, slot: memoryview | None = None) -> None:
        words = memoryview(bytearray(SLOT_BYTES)) if slot is None else slot
        self._integers = words.cast("q")
        self._seconds = words.cast("d")

    def begin_batch(self, batch: int) -> None:
        """Say that the batch after ``batch`` trained ones begins. Hot path."""
        # In this order: a reader in between takes the previous batch for younger, and never the new one for older.
        self._seconds[_SINCE] = time.monotonic()
        self._integers[_BATCH] = batch
        self._integers[_PHASE] = 1

    def await_data(self) -> None:
        """Say that the main thread waits for its loader, within its phase. Hot path."""
        self._integers[_WAITS] = 1

    def end_wait(self) -> None:
        """Say that the loader has answered. Hot path."""
        self._integers[_WAITS] = 0

    def begin(self, phase: Phase, batch: int) -> None:
        """Enter a phase of the main thread after ``batch`` trained batches."""
        self._begin(MAIN_LANE, phase, batch)

    @property
    def phase(self) -> Phase:
        return Phase(self._integers[_PHASE])

    @contextlib.contextmanager
    def during(self, phase: Phase, batch: int) -> Iterator[None]:
        """Be in a phase during a block, and between batches if the block ends well."""
        self.begin(phase, batch)
        yield
        self.begin(Phase.BETWEEN, batch)

    def begin_save(self, batch: int) -> None:
        """Say that this thread saves the checkpoint after ``batch`` batches."""
        self._begin(SAVE_LANE, Phase.SAVE, batch)

    def end_save(self) -> None:
        self._begin(SAVE_LANE, Phase.NONE, self._integers[SAVE_LANE + _BATCH])

    def end(self, phase: Phase = Phase.NONE) -> None:
        """Leave all phases; the number of trained batches stays."""
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
    """Return this process's heartbeat, the same at every call. Ranks: each its own."""
    return _opened(os.environ.get(HEARTBEAT_VARIABLE, ""), os.getpid())


def leave() -> None:
    """Say that this rank's program has ended; a no-op if the rank has not trained."""
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
    except (OSError, ValueError):  # its launcher was killed and the directory is gone
        return Heartbeat()
    integers = words.cast("q")
    # The processes that a rank starts inherit the variable and must not write into the rank's slot.
    if integers[_PID] not in (0, pid) and start_ticks(integers[_PID]) == integers[_TICKS]:
        return Heartbeat()
    integers[_THREAD] = threading.main_thread().ident or 0
    integers[_TICKS] = start_ticks(pid) or 0
    integers[_PID] = pid
    return Heartbeat(words)


def _slot(buffer: mmap.mmap | bytearray, slot: int) -> memoryview:
    return memoryview(buffer)[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]


def make_heartbeat_file(path: Path, num_slots: int) -> mmap.mmap:
    # Written, not only sized: a write to a mapped page without room on the disk ends a process by SIGBUS.
    path.write_bytes(bytes(num_slots * SLOT_BYTES))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def read_beat(buffer: mmap.mmap | bytearray, slot: int, lane: int = MAIN_LANE) -> Beat | None:
    """Return one lane of a slot; None as long as no rank has claimed the slot."""
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
