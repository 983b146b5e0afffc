"""Where this rank is in training, in a file that its launcher has mapped as well.

A rank writes and the launcher reads: no lock, no system call. Without a launcher of ours the same is written into private
memory. The file has one slot for each rank of this machine, ``SLOT_BYTES`` long.

What a beat costs is not its instructions (0.3 us in a row) but their cache misses, as a training step has filled the caches with
its own: ten times that. So the hot path stores through views and touches as little as it can; ``struct`` touches twice as much.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dstrial.process_state import start_ticks

HEARTBEAT_VARIABLE = "DSTRIAL_HEARTBEAT"
"""Environment variable with the slot of a rank and the file, as ``SLOT:PATH``."""

SLOT_BYTES = 128

# Little-endian and without padding, as the launcher may run another Python than its ranks.
_MAIN = struct.Struct(
    "<Iiqd"
)  # phase, whether it waits for data, batches trained, since when (CLOCK_MONOTONIC)
_WAITS_AT = 4
_BATCH_AT = 8
_SINCE_AT = 16
_SAVE = struct.Struct("<qd")  # batches trained, since when; 0.0 if nothing is saved in the background
_SAVE_AT = 24
_OWNER = struct.Struct("<QQQ")  # pid, its start in ticks since boot, the identifier of its main thread
_OWNER_AT = 40
_LONGEST = struct.Struct("<d")
_LONGEST_AT = 64


class Phase(enum.IntEnum):
    """What the main thread of a rank does."""

    NONE = 0
    """What nothing is known of: a start, a script, the end."""
    BATCH = 1
    BETWEEN = 2
    """Exchanges and reports between batches."""
    VALIDATION = 3
    SAVE = 4
    CALLBACK = 5
    """A callback of the user's, between batches."""
    SCRIPT = 6
    """Code between two batches of which nothing is known: how long it may take is its own affair."""
    LEAVING = 7
    """Nothing: the program has ended, and threads and exit handlers keep the process."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beat:
    """One slot's content.

    ``since_s`` is when the phase began, for a batch when that very batch began, by the machine's monotonic clock; ``save_*``
    are of the checkpoint that is written in the background (0: none). ``longest_s`` has the longest ended so far of each phase
    (0: none); of a row of batches only the last counts.
    """

    phase: Phase
    waits_for_data: bool
    batch: int
    since_s: float
    save_batch: int
    save_since_s: float
    pid: int
    start_ticks: int
    thread_id: int
    longest_s: tuple[float, ...]


class Heartbeat:
    """Writes this rank's slot; into private memory without a buffer.

    The main thread and the thread of saves use it.
    """

    def __init__(self, buffer: mmap.mmap | bytearray | None = None, offset: int = 0) -> None:
        self._buffer = bytearray(SLOT_BYTES) if buffer is None else buffer
        self._offset = offset
        slot = memoryview(self._buffer)[offset : offset + SLOT_BYTES]
        self._waits = slot[_WAITS_AT:_BATCH_AT]  # little-endian, so that its first byte is what changes
        if sys.byteorder == "little":
            self._phase_and_waits = slot[:_BATCH_AT].cast("q")
            self._batch = slot[_BATCH_AT:_SINCE_AT].cast("q")
            self._since = slot[_SINCE_AT:_SAVE_AT].cast("d")
        else:
            self.begin_batch = self._begin_batch_slowly  # type: ignore[method-assign]

    def begin_batch(self, batch: int) -> None:
        """Say that the batch after ``batch`` trained ones begins. Hot path."""
        # In this order: read in between, the last batch seems younger than it is, and never the new one older.
        self._since[0] = time.monotonic()
        self._batch[0] = batch
        self._phase_and_waits[0] = 1

    def _begin_batch_slowly(self, batch: int) -> None:
        _MAIN.pack_into(self._buffer, self._offset, 1, 0, batch, time.monotonic())

    def await_data(self) -> None:
        """Say that the main thread waits for its loader, inside what it does. Hot path."""
        self._waits[0] = 1

    def end_wait(self) -> None:
        """Say that the loader has answered. Hot path."""
        self._waits[0] = 0

    def begin(self, phase: Phase, batch: int) -> None:
        """Say what the main thread does from now on, after ``batch`` trained batches."""
        now_s = time.monotonic()
        number, _, _, since_s = _MAIN.unpack_from(self._buffer, self._offset)
        if number == Phase.BATCH:  # the last of a row: a launcher sees the others only by chance
            self._note(Phase.BATCH, now_s - since_s)
        _MAIN.pack_into(self._buffer, self._offset, int(phase), 0, batch, now_s)

    def follow(self, phase: Phase, batch: int) -> None:
        """Say what the main thread does from now on, what it did before having ended well."""
        now_s = time.monotonic()
        number, _, _, since_s = _MAIN.unpack_from(self._buffer, self._offset)
        if number != Phase.NONE:
            self._note(number, now_s - since_s)
        _MAIN.pack_into(self._buffer, self._offset, int(phase), 0, batch, now_s)

    @property
    def phase(self) -> Phase:
        return Phase(_MAIN.unpack_from(self._buffer, self._offset)[0])

    @contextlib.contextmanager
    def during(self, phase: Phase, batch: int) -> Iterator[None]:
        """Say what the main thread does in a block; keep how long if it ends well."""
        self.begin(phase, batch)
        began_s = time.monotonic()
        yield
        self._note(phase, time.monotonic() - began_s)
        self.begin(Phase.BETWEEN, batch)

    def begin_save(self, batch: int) -> None:
        _SAVE.pack_into(self._buffer, self._offset + _SAVE_AT, batch, time.monotonic())

    def end_save(self) -> None:
        batch, since_s = _SAVE.unpack_from(self._buffer, self._offset + _SAVE_AT)
        if since_s:
            self._note(Phase.SAVE, time.monotonic() - since_s)
        _SAVE.pack_into(self._buffer, self._offset + _SAVE_AT, batch, 0.0)

    def end(self, phase: Phase = Phase.NONE) -> None:
        """Say that nothing is known from now on but how many batches were trained."""
        _, _, batch, _ = _MAIN.unpack_from(self._buffer, self._offset)
        self.begin(phase, batch)

    def _note(self, phase: Phase, seconds: float) -> None:
        at = self._offset + _LONGEST_AT + _LONGEST.size * int(phase)
        (longest_s,) = _LONGEST.unpack_from(self._buffer, at)
        if seconds > longest_s:
            _LONGEST.pack_into(self._buffer, at, seconds)


def heartbeat() -> Heartbeat:
    """Return this process's heartbeat, the same at every call. Ranks: each its own."""
    return _opened(os.environ.get(HEARTBEAT_VARIABLE, ""), os.getpid())


def leave() -> None:
    """Say that this rank's program has ended; nothing where it has not trained."""
    if _opened.cache_info().currsize:
        heartbeat().end(Phase.LEAVING)


@functools.lru_cache(maxsize=1)
def _opened(named: str, pid: int) -> Heartbeat:
    slot, separator, path = named.partition(":")
    if not separator:
        return Heartbeat()
    try:
        with Path(path).open("r+b") as file:
            buffer = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):  # its launcher was killed and the directory is gone
        return Heartbeat()
    offset = int(slot) * SLOT_BYTES
    owner_pid, owner_ticks, _ = _OWNER.unpack_from(buffer, offset + _OWNER_AT)
    # What a rank starts has its variables, too.
    if owner_pid not in (0, pid) and start_ticks(owner_pid) == owner_ticks:
        return Heartbeat()
    main_id = threading.main_thread().ident or 0
    _OWNER.pack_into(buffer, offset + _OWNER_AT, pid, start_ticks(pid) or 0, main_id)
    return Heartbeat(buffer, offset)


def make_heartbeat_file(path: Path, num_slots: int) -> mmap.mmap:
    # Written, not only sized: a write to a mapped page that the disk has no room for ends a process by SIGBUS.
    path.write_bytes(bytes(num_slots * SLOT_BYTES))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def read_beat(buffer: mmap.mmap | bytearray, slot: int) -> Beat | None:
    """Return what a slot says; None as long as no rank has claimed it."""
    offset = slot * SLOT_BYTES
    before = bytes(buffer[offset : offset + SLOT_BYTES])
    for _ in range(3):  # a rank may write meanwhile
        after = bytes(buffer[offset : offset + SLOT_BYTES])
        if after == before:
            break
        before = after
    pid, ticks, thread_id = _OWNER.unpack_from(before, _OWNER_AT)
    if not pid:
        return None
    number, waits, batch, since_s = _MAIN.unpack_from(before, 0)
    save_batch, save_since_s = _SAVE.unpack_from(before, _SAVE_AT)
    longest_s = tuple(
        float(_LONGEST.unpack_from(before, _LONGEST_AT + _LONGEST.size * phase)[0]) for phase in Phase
    )
    phase = Phase(number) if number in set(Phase) else Phase.NONE
    return Beat(
        phase, bool(waits), batch, since_s, save_batch, save_since_s, pid, ticks, thread_id, longest_s
    )
