"""Poll the ranks' heartbeats; log a stall, and describe it in ``stalled.json``."""

from __future__ import annotations

import dataclasses
import linecache
import math
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dstrial.file_writes import replace_file
from dstrial.launch.stalls.diagnosis import (
    Diagnosis,
    RankView,
    Stall,
    StallSettings,
    diagnose,
    find_longest,
    find_stall,
    sentence,
)
from dstrial.launch.stalls.stacks import (
    Place,
    ThreadStack,
    Wait,
    dump_stacks,
    parse_stacks,
    place_in_worker,
    place_of,
    stack_of,
    thread_names,
)
from dstrial.launch.watches import StatusFile
from dstrial.local.run_directory import shown_path
from dstrial.process_state import kernel_function, read_state
from dstrial.ranks.heartbeat import MAIN_LANE, SAVE_LANE, Beat, Phase, read_beat

EXIT_TIMEOUT_S = 60.0
"""Grace period from the end of a rank's program to its exit, seconds; loggers flush in this time."""

POLL_S = 0.5
_MAX_POLL_S = 2.0  # limits the time counted per poll, as the launcher or machine may have been suspended
_MAX_FRAMES = 25


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedRanks:
    """The heartbeats and stack files of this machine's ranks, for stall detection.

    Attributes:
        beats: the heartbeat file, mapped into memory.
        ranks: slot in ``beats`` -> rank.
        stacks_files: rank -> file to which the rank writes its stacks.
        kept_stacks: directory for full stacks after a stall; None to keep none.
        has_other_nodes: whether the straggler may be on another machine.
    """

    beats: mmap.mmap | bytearray
    ranks: Mapping[int, int]
    stacks_files: Mapping[int, Path]
    kept_stacks: Path | None = None
    has_other_nodes: bool = False


@dataclasses.dataclass(slots=True)
class _LaneState:
    """The last heartbeat of a rank's main or save thread, and when its phase changed."""

    beat: Beat
    since_s: float
    stopped_since_s: float | None = None


class StallWatch:
    """Detects and reports stalls of ranks; one thread calls ``poll`` periodically.

    ``end_ranks`` gets the straggler (None if unknown) and the log line, and ends all ranks. ``kill_hanging`` gets the local
    rank of a process whose program has ended but which does not exit, and kills the process.
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
        self._now_s = 0.0  # time watched
        self._seen: dict[tuple[int, int], _LaneState] = {}
        self._longest_batch_s: float | None = None
        self._stopped_s = -math.inf  # last time at which a rank was stopped
        self._stall: Stall | None = None
        self._reported_s: float | None = None
        self._reported_batch = 0
        self._has_deferred = False
        self._has_ended_ranks = False
        self._status_file = StatusFile("stalled.json")
        self._killed_slots: set[int] = set()

    def poll(self) -> None:
        if self._has_ended_ranks:
            return
        now_s = self._clock()
        self._now_s += min(now_s - self._polled_s, _MAX_POLL_S)
        self._polled_s = now_s
        views, saves = [], []
        for slot in list(self._watched.ranks):
            view = self._view(slot, MAIN_LANE)
            if view is not None and view.beat.phase is Phase.LEAVING:
                self._end_if_late(slot, view)
            elif view is not None:
                views.append(view)
                saves += [save for save in [self._view(slot, SAVE_LANE)] if save is not None]
        longest_s = find_longest(views, self._longest_batch_s)
        stall = find_stall(views, longest_s, self._settings) or find_stall(saves, longest_s, self._settings)
        before = self._stall
        if before is not None and (stall is None or (stall.kind, stall.batch) != (before.kind, before.batch)):
            self._end_stall(has_live_ranks=bool(views))
        self._stall = stall
        # Report at once, and again each time the duration has doubled.
        if stall is not None and (self._reported_s is None or stall.lasted_s >= 2 * self._reported_s):
            self._reported_s = stall.lasted_s
            self._reported_batch = self._farthest()
            is_saving = stall.kind is Phase.SAVE and any(one.beat.phase is Phase.SAVE for one in saves)
            self._report(stall, saves if is_saving else views)

    def close(self) -> None:
        if not self._has_ended_ranks:
            for slot in self._watched.ranks:
                self._view(slot, MAIN_LANE)
            self._end_stall(has_live_ranks=False)
        self._status_file.write(None)

    def _end_stall(self, *, has_live_ranks: bool) -> None:
        stall, self._stall = self._stall, None
        has_gone_on = has_live_ranks or self._farthest() > self._reported_batch
        if stall is not None and self._reported_s is not None and has_gone_on:
            self._print_line(f"{stall.prefix} no longer; training is at batch {self._farthest()}")
        self._reported_s, self._has_deferred = None, False
        self._status_file.write(None)

    def _farthest(self) -> int:
        return max((one.beat.batch for (_, lane), one in self._seen.items() if lane == MAIN_LANE), default=0)

    def _view(self, slot: int, lane: int) -> RankView | None:
        beat = read_beat(self._watched.beats, slot, lane)
        if beat is None:
            return None
        seen = self._advance(slot, lane, beat)
        state = read_state(beat.pid)
        if state is None or state.start_ticks != beat.start_ticks or state.has_ended:
            return None  # the supervisor reports exited ranks
        if not state.is_stopped:
            seen.stopped_since_s = None
        else:
            self._stopped_s = self._now_s
            if seen.stopped_since_s is None:
                seen.stopped_since_s = self._now_s
        stopped_s = 0.0 if seen.stopped_since_s is None else self._now_s - seen.stopped_since_s
        function = kernel_function(beat.pid) if state.is_uninterruptible else ""
        age_s = self._now_s - seen.since_s
        return RankView(self._watched.ranks[slot], beat, age_s, state.letter, stopped_s, function)

    def _advance(self, slot: int, lane: int, beat: Beat) -> _LaneState:
        seen = self._seen.get((slot, lane))
        if seen is None or seen.beat.pid != beat.pid:
            seen = self._seen[slot, lane] = _LaneState(beat, self._now_s)
            return seen
        old, seen.beat = seen.beat, beat
        # A wait for data is part of its batch: only the start of a phase counts as progress.
        if (beat.phase, beat.batch, beat.since_s) != (old.phase, old.batch, old.since_s):
            if old.phase is Phase.BATCH and lane == MAIN_LANE and self._stopped_s < seen.since_s:
                took_s = min(beat.since_s - old.since_s, self._now_s - seen.since_s + _MAX_POLL_S)
                self._longest_batch_s = max(self._longest_batch_s or 0.0, took_s)
            elif beat.batch > old.batch:  # one or more between two polls
                self._longest_batch_s = self._longest_batch_s or 0.0
            seen.since_s = self._now_s
        return seen

    def _dump(self, views: Sequence[RankView]) -> dict[int, list[ThreadStack]]:
        """Store and return all threads' stacks by rank; stopped ranks are left out."""
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
        places: dict[int, Place] = {}
        for view in views:
            place = place_of(stacks.get(view.rank, []), view.beat.thread_id, linecache.getline)
            if place is not None and place.wait is Wait.DATA:
                place = place_in_worker(place, view.beat.pid, self._watched.stacks_files[view.rank])
            if place is not None:
                places[view.rank] = place
        diagnosis = diagnose(views, places)
        line = sentence(stall, diagnosis)
        self._print_line(line)
        if not stall.is_certain:
            return
        self._status_file.write({"text": diagnosis.text, "since_s": time.time() - stall.lasted_s})
        self._print_stacks(views, stacks)
        self._restart(diagnosis, line)

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

    def _restart(self, diagnosis: Diagnosis, line: str) -> None:
        if self._settings.action != "restart" or diagnosis.is_of_master:
            return
        if self._watched.has_other_nodes and diagnosis.straggler is None and not self._has_deferred:
            self._has_deferred = True
            self._print_line(
                "stalled: the straggler may be on another machine, whose launcher ends its ranks; those of this machine are "
                "ended after twice as long"
            )
            return
        self._print_line("stalled: the ranks are ended, as data.dstrial.stall_action says")
        self._has_ended_ranks = True
        self._end_ranks(diagnosis.straggler, line)

    def _end_if_late(self, slot: int, view: RankView) -> None:
        """Kill a rank whose program ended long ago; log the threads that delay its exit."""
        if view.age_s <= EXIT_TIMEOUT_S or slot in self._killed_slots:
            return
        self._killed_slots.add(slot)
        path = self._watched.stacks_files[view.rank]
        stacks = self._dump([view]).get(view.rank, [])
        names = thread_names(path.read_text(errors="replace")) if path.exists() else {}
        held = [(f"thread {names[one.thread_id]!r}", one) for one in stacks if one.thread_id in names]
        main = stack_of(stacks, view.beat.thread_id)
        if not held and main is not None:
            held = [("an exit handler", main)]
        places = [(name, place_of([one], one.thread_id)) for name, one in held]
        texts = [
            f"{name} is in {place.call}" if place and place.call else f"{name} runs" for name, place in places
        ]
        why = "; ".join(texts) or "it has no Python stack, so that native code or a signal holds it"
        self._print_line(
            f"warning: rank {view.rank} has not ended {EXIT_TIMEOUT_S:g} s after its program: {why}. The rank is ended now, and "
            "what it trained counts. Have threads and exit handlers end with the program."
        )
        for name, one in held:
            self._print_line(f"stack of {name} of rank {view.rank}, most recent call first:")
            for frame in one.frames[:_MAX_FRAMES]:
                self._print_line(f"  {frame}")
        self._kill_hanging(slot)
