"""Poll the ranks' heartbeats; log a stall, and describe it in ``stalled.json``."""

from __future__ import annotations

import dataclasses
import linecache
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dstrial.file_writes import replace_file
from dstrial.launch.stalls.diagnosis import (
    RankView,
    Stall,
    StallSettings,
    diagnose,
    find_longest,
    find_stall,
    sentence,
)
from dstrial.launch.stalls.stacks import ThreadStack, dump_stacks, parse_stacks, place_of, stack_of
from dstrial.launch.watches import StatusFile
from dstrial.local.run_directory import shown_path
from dstrial.process_state import read_state
from dstrial.ranks.heartbeat import Beat, Phase, read_beat

EXIT_TIMEOUT_S = 60.0
"""Grace period from the end of a rank's program to its exit, seconds; loggers flush in this time."""

POLL_S = 0.5  # interval of polls of the heartbeats
_MAX_POLL_S = 2.0  # limits the time counted per poll, as the launcher or machine may have been suspended
_MAX_FRAMES = 25  # maximum number of calls of a stack in the log


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedRanks:
    """The heartbeats and stack files of this machine's ranks, for stall detection.

    Attributes:
        beats: the heartbeat file, mapped into memory.
        ranks: index of a heartbeat in ``beats`` -> global rank.
        stacks_files: rank -> file to which the rank writes its stacks.
        kept_stacks: directory into which all stacks are written at a stall; None to write none.
    """

    beats: mmap.mmap | bytearray
    ranks: Mapping[int, int]
    stacks_files: Mapping[int, Path]
    kept_stacks: Path | None = None


@dataclasses.dataclass(slots=True)
class _LastBeat:
    """A rank's last heartbeat, the time of its change, and the time of a stop signal."""

    beat: Beat
    since_s: float
    stopped_since_s: float | None = None


class StallWatch:
    """Detects and reports stalls of ranks; one thread calls ``poll`` periodically.

    ``end_ranks(straggler, line)`` must end all ranks: the straggler is a rank, None if unknown; ``line`` is the log line.
    ``kill_hanging(local_rank)`` must kill a process whose program has ended but which does not exit.
    """

    def __init__(
        self,
        watched: WatchedRanks,
        settings: StallSettings,
        print_line: Callable[[str], None],
        end_ranks: Callable[[int | None, str], None],
        kill_hanging: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._settings = settings
        self._print_line = print_line
        self._end_ranks = end_ranks
        self._kill_hanging = kill_hanging
        self._clock = clock
        self._polled_s = clock()
        self._now_s = 0.0  # time since the start, without suspensions
        self._seen: dict[int, _LastBeat] = {}  # index of a heartbeat -> last heartbeat
        self._stall: Stall | None = None
        self._reported_s: float | None = None
        self._reported_batch = 0
        self._has_ended_ranks = False
        self._status_file = StatusFile("stalled.json")
        self._killed_slots: set[int] = set()

    def poll(self) -> None:
        if self._has_ended_ranks:
            return
        now_s = self._clock()
        self._now_s += min(now_s - self._polled_s, _MAX_POLL_S)
        self._polled_s = now_s
        views = []
        for slot in self._watched.ranks:
            view = self._view(slot)
            if view is not None and view.beat.phase is Phase.LEAVING:
                self._end_if_late(slot, view)
            elif view is not None:
                views.append(view)
        stall, before = find_stall(views, find_longest(views), self._settings), self._stall
        if before is not None and (stall is None or (stall.kind, stall.batch) != (before.kind, before.batch)):
            self._end_stall(has_live_ranks=bool(views))
        self._stall = stall
        # Report at once, and again each time the duration has doubled.
        if stall is not None and (self._reported_s is None or stall.lasted_s >= 2 * self._reported_s):
            self._reported_s, self._reported_batch = stall.lasted_s, self._farthest()
            self._report(stall, views)

    def close(self) -> None:
        if not self._has_ended_ranks:
            for slot in self._watched.ranks:
                self._view(slot)
            self._end_stall(has_live_ranks=False)
        self._status_file.write(None)

    def _end_stall(self, *, has_live_ranks: bool) -> None:
        stall, self._stall = self._stall, None
        has_gone_on = has_live_ranks or self._farthest() > self._reported_batch
        if stall is not None and self._reported_s is not None and has_gone_on:
            self._print_line(f"{stall.prefix} no longer; training is at batch {self._farthest()}")
        self._reported_s = None
        self._status_file.write(None)

    def _farthest(self) -> int:
        return max((one.beat.batch for one in self._seen.values()), default=0)

    def _view(self, slot: int) -> RankView | None:
        beat = read_beat(self._watched.beats, slot)
        if beat is None:
            return None
        seen = self._seen.setdefault(slot, _LastBeat(beat, self._now_s))
        if (beat.phase, beat.batch, beat.since_s) != (seen.beat.phase, seen.beat.batch, seen.beat.since_s):
            seen.since_s = self._now_s
        seen.beat = beat
        state = read_state(beat.pid)
        if state is None or state.start_ticks != beat.start_ticks or state.has_ended:
            return None  # the supervisor reports exited ranks
        if not state.is_stopped:
            seen.stopped_since_s = None
        elif seen.stopped_since_s is None:
            seen.stopped_since_s = self._now_s
        stopped_s = 0.0 if seen.stopped_since_s is None else self._now_s - seen.stopped_since_s
        return RankView(self._watched.ranks[slot], beat, self._now_s - seen.since_s, state.letter, stopped_s)

    def _dump(self, views: Sequence[RankView]) -> dict[int, list[ThreadStack]]:
        """Make ranks dump their Python stacks; return rank -> stacks of its threads.

        Stopped ranks are left out. If ``kept_stacks`` is set, the stacks are also written to files in this directory.
        """
        files = self._watched.stacks_files
        asked = {view.beat.pid: view.rank for view in views if view.state not in "tT" and view.rank in files}
        found = {}
        for pid, text in dump_stacks({pid: files[rank] for pid, rank in asked.items()}).items():
            rank = asked[pid]
            found[rank] = parse_stacks(text)
            if self._watched.kept_stacks is not None:
                try:
                    self._watched.kept_stacks.mkdir(mode=0o700, parents=True, exist_ok=True)
                    path = self._watched.kept_stacks / f"rank_{rank}.stacks.txt"
                    replace_file(path, text, sync=False, is_private=True)
                except OSError as error:
                    self._print_line(f"warning: the stacks of rank {rank} are not kept: {error}")
        return found

    def _report(self, stall: Stall, views: Sequence[RankView]) -> None:
        stacks = self._dump(views)
        threads = {view.rank: view.beat.thread_id for view in views}
        found = {rank: place_of(stacks.get(rank, []), threads[rank], linecache.getline) for rank in threads}
        diagnosis = diagnose(views, {rank: place for rank, place in found.items() if place is not None})
        line = sentence(stall, diagnosis)
        self._print_line(line)
        if not stall.is_certain:
            return
        self._status_file.write({"text": diagnosis.text, "since_s": time.time() - stall.lasted_s})
        self._print_stacks(views, stacks)
        if self._settings.action == "restart" and not diagnosis.is_of_master:
            self._print_line("stalled: the ranks are ended, as data.dstrial.stall_action says")
            self._has_ended_ranks = True
            self._end_ranks(diagnosis.straggler, line)

    def _print_stacks(self, views: Sequence[RankView], stacks: Mapping[int, Sequence[ThreadStack]]) -> None:
        alike: dict[tuple[str, ...], list[str]] = {}
        for view in views:
            stack = stack_of(stacks.get(view.rank, []), view.beat.thread_id)
            if stack is not None:
                calls = tuple(map(str, stack.frames[:_MAX_FRAMES]))
                alike.setdefault(calls, []).append(f"{view.rank} (process {view.beat.pid})")
        for calls, names in alike.items():
            self._print_line(f"stalled: stack of rank {', '.join(names)}, most recent call first:")
            for call in calls:
                self._print_line(f"  {call}")
        if self._watched.kept_stacks is not None and stacks:
            path = shown_path(self._watched.kept_stacks)
            self._print_line(f"stalled: the stacks of all threads are in {path}")

    def _end_if_late(self, slot: int, view: RankView) -> None:
        """Kill and log a rank whose program ended more than ``EXIT_TIMEOUT_S`` ago."""
        if view.age_s <= EXIT_TIMEOUT_S or slot in self._killed_slots:
            return
        self._killed_slots.add(slot)
        stacks = self._dump([view]).get(view.rank, [])
        places = [place_of([stack], stack.thread_id) for stack in stacks]
        calls = sorted({place.call for place in places if place is not None and place.call})
        where = f": its threads are in {', '.join(calls)}" if calls else ""
        self._print_line(
            f"warning: rank {view.rank} has not ended {EXIT_TIMEOUT_S:g} s after its program{where}. The rank is ended now, and "
            "what it trained counts. Have threads and exit handlers end with the program."
        )
        self._kill_hanging(slot)
