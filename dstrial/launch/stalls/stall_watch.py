"""Tells people that ranks have stalled: which is where, and who waits for whom.

A thread of the launcher looks at what ranks say in their heartbeats. Once they go on no more, it asks the kernel how their
processes are and the ranks for their Python stacks, says it in the log and in ``stalled.json`` of the allocation's directory, and
ends the ranks if that is configured. What it decides is in ``stall_rules``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import linecache
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from dstrial.launch.stalls.stack_requests import ask_for_stacks, ask_workers
from dstrial.launch.stalls.stacks import (
    Place,
    ThreadStack,
    Wait,
    main_stack,
    place_in_worker,
    place_of,
    place_of_save,
    saving_stack,
    thread_names,
)
from dstrial.launch.stalls.stall_account import (
    PREFIX,
    SLOW_PREFIX,
    Account,
    account,
    account_of_save,
    sentence,
)
from dstrial.launch.stalls.stall_board import NodeAccount, StallBoard
from dstrial.launch.stalls.stall_rules import (
    EXIT_TIMEOUT_S,
    RankView,
    Stall,
    StallSettings,
    is_told,
    longest_of,
    may_restart,
    stall_of,
)
from dstrial.launch.watches import ShownFile
from dstrial.local.run_directory import shown_path
from dstrial.process_state import kernel_function, read_state
from dstrial.ranks.heartbeat import Beat, Phase, read_beat

STALLED_NAME = "stalled.json"
LOOK_EVERY_S = 0.5
# A launcher that was itself stopped, or a machine that slept, has not watched meanwhile.
_MOST_PER_LOOK_S = 2.0
_UNINTERRUPTIBLE_LOOKS = 6
_SHOWN_FRAMES = 25
_OTHERS_MAY_TAKE_S = 3.0


@dataclasses.dataclass(frozen=True, slots=True)
class WatchedRanks:
    """Heartbeats, global numbers by slot, and files of this machine's ranks.

    ``memory`` keeps the positions that ranks were ended at. ``board`` connects launchers of several machines.
    """

    beats: mmap.mmap | bytearray
    ranks: Mapping[int, int]
    stacks_files: Mapping[int, Path]
    kept_stacks: Path | None = None
    memory: Path | None = None
    board: StallBoard | None = None


@dataclasses.dataclass(slots=True)
class _Seen:
    """What the watch knows of one rank from one look to the next."""

    beat: Beat
    since_s: float
    save_since_s: float = 0.0
    stopped_since_s: float | None = None
    looks_uninterruptible: int = 0
    counts: bool = True  # towards the longest so far: not with somebody stopped meanwhile


class StallWatch:
    """Watches ranks; ``look`` is called again and again, by one thread.

    ``end_left`` ends the rank of a slot whose program has ended.
    """

    def __init__(
        self,
        watched: WatchedRanks,
        settings: StallSettings,
        print_line: Callable[[str], None],
        end_ranks: Callable[[int | None, str], None],
        end_left: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watched = watched
        self._settings = settings
        self._print_line = print_line
        self._end_ranks = end_ranks
        self._end_left = end_left
        self._clock = clock
        self._looked_s = clock()
        self._now_s = 0.0
        self._seen: dict[int, _Seen] = {}
        self._longest_batch_s: float | None = None
        self._stall: Stall | None = None
        self._told_s: float | None = None
        self._told_batch = 0
        self._began_s = 0.0
        self._has_ended_them = False
        self._shown = ShownFile(STALLED_NAME)
        self._left: set[int] = set()

    def look(self) -> None:
        if self._has_ended_them:
            return
        now_s = self._clock()
        self._now_s += min(now_s - self._looked_s, _MOST_PER_LOOK_S)
        self._looked_s = now_s
        views = []
        for slot in list(self._watched.ranks):
            view = self._view(slot)
            if view is not None and view.beat.phase is Phase.LEAVING:
                self._end_if_late(slot, view)
            elif view is not None:
                views.append(view)
        if any(view.is_stopped for view in views):
            for seen in self._seen.values():
                seen.counts = False
        found = stall_of(views, longest_of(views, self._longest_batch_s), self._settings)
        before = self._stall
        if before is not None and (found is None or found.position != before.position):
            if views:
                self._tell_end(before, f"goes on at batch {_farthest(view.beat for view in views)}")
            else:
                self._tell_went_on(before)
            self._told_s = None
            self._show(None)
            if self._watched.board is not None:
                self._watched.board.tell("", has_guilty=False)
        self._stall = found
        if found is not None and is_told(found.lasted_s, self._told_s):
            self._told_s = found.lasted_s
            self._told_batch = _farthest(view.beat for view in views)
            self._tell(found, views)

    def close(self) -> None:
        """Remove what is shown, and say where ranks went on after the last look."""
        self._show(None)
        if self._stall is not None and not self._has_ended_them:
            for slot in self._watched.ranks:
                beat = read_beat(self._watched.beats, slot)
                if beat is not None:
                    self._advance(slot, beat)
            self._tell_went_on(self._stall)

    def _end_if_late(self, slot: int, view: RankView) -> None:
        if view.age_s <= EXIT_TIMEOUT_S or slot in self._left:
            return
        self._left.add(slot)
        path = self._watched.stacks_files[view.rank]
        stacks = ask_for_stacks([view], {view.rank: path}, self._watched.kept_stacks).get(view.rank, [])
        names = thread_names(path.read_text(errors="replace")) if path.exists() else {}
        held = [(f"thread {names[one.thread_id]!r}", one) for one in stacks if one.thread_id in names]
        main = main_stack(stacks, view.beat.thread_id)
        if not held and main is not None:
            held = [("an exit handler", main)]
        texts = []
        for name, one in held:
            place = place_of([one], one.thread_id)
            texts.append(f"{name} is in {place.user_call}" if place and place.user_call else f"{name} runs")
        why = "; ".join(texts) or "it has no Python stack, so that native code or a signal holds it"
        self._print_line(
            f"warning: rank {view.rank} has not ended {EXIT_TIMEOUT_S:g} s after its program: {why}. The rank is ended now, and "
            "what it trained counts. Have threads and exit handlers end with the program."
        )
        for name, one in held:
            self._print_line(f"stack of {name} of rank {view.rank}, most recent call first:")
            for frame in one.frames[:_SHOWN_FRAMES]:
                self._print_line(f"  {frame}")
        self._end_left(slot)

    # ---- what ranks say --------------------------------------------------------------------------------

    def _view(self, slot: int) -> RankView | None:
        beat = read_beat(self._watched.beats, slot)
        if beat is None:
            return None
        seen = self._advance(slot, beat)
        state = read_state(beat.pid)
        if state is None or state.start_ticks != beat.start_ticks or state.letter == "Z":
            return None  # it has ended; that is the supervisor's to tell
        if not state.is_stopped:
            seen.stopped_since_s = None
        elif seen.stopped_since_s is None:
            seen.stopped_since_s = self._now_s
        seen.looks_uninterruptible = seen.looks_uninterruptible + 1 if state.is_uninterruptible else 0
        is_uninterruptible = seen.looks_uninterruptible >= _UNINTERRUPTIBLE_LOOKS
        return RankView(
            rank=self._watched.ranks[slot],
            pid=beat.pid,
            beat=beat,
            age_s=self._now_s - seen.since_s,
            save_age_s=self._now_s - seen.save_since_s if beat.save_since_s else 0.0,
            is_stopped=state.is_stopped,
            is_traced=state.letter == "t",
            stopped_s=0.0 if seen.stopped_since_s is None else self._now_s - seen.stopped_since_s,
            is_uninterruptible=is_uninterruptible,
            kernel_function=kernel_function(beat.pid) if is_uninterruptible else "",
        )

    def _advance(self, slot: int, beat: Beat) -> _Seen:
        seen = self._seen.get(slot)
        if seen is None or seen.beat.pid != beat.pid:
            seen = self._seen[slot] = _Seen(beat, self._now_s, self._now_s)
            return seen
        old = seen.beat
        # A wait for data is a part of its batch: only the beginning of a phase counts as a step.
        if (beat.phase, beat.batch, beat.since_s) != (old.phase, old.batch, old.since_s):
            if old.phase is Phase.BATCH and seen.counts:
                took_s = min(beat.since_s - old.since_s, self._now_s - seen.since_s + _MOST_PER_LOOK_S)
                self._longest_batch_s = max(self._longest_batch_s or 0.0, took_s)
            elif beat.batch > old.batch:  # one or more between two looks
                self._longest_batch_s = self._longest_batch_s or 0.0
            seen.since_s, seen.counts = self._now_s, True
        if beat.save_since_s != old.save_since_s:
            seen.save_since_s = self._now_s
        seen.beat = beat
        return seen

    # ---- telling ---------------------------------------------------------------------------------------

    def _tell_end(self, stall: Stall, training: str) -> None:
        if self._told_s is not None:
            prefix = PREFIX if stall.is_certain else SLOW_PREFIX
            self._print_line(f"{prefix} no longer, training {training}")

    def _tell_went_on(self, stall: Stall) -> None:
        batch = _farthest(seen.beat for seen in self._seen.values())
        if batch > self._told_batch:
            self._tell_end(stall, f"went on to batch {batch}")

    def _tell(self, stall: Stall, views: Sequence[RankView]) -> None:
        stacks = ask_for_stacks(views, self._watched.stacks_files, self._watched.kept_stacks)
        # A main thread that saves waits for what the background writes, if anything.
        is_saving = stall.kind is Phase.SAVE and any(view.save_age_s > 0 for view in views)
        told = self._account_of_save(views, stacks) if is_saving else self._account(views, stacks)
        text = sentence(stall, told)
        self._print_line(text)
        others = self._ask_others(stall, told)
        if not stall.is_certain:
            return
        self._began_s = time.time() - stall.lasted_s
        self._show(told.text)
        for line in _shown_stacks(views, stacks, is_saving=is_saving):
            self._print_line(line)
        if self._watched.kept_stacks is not None and stacks:
            self._print_line(
                f"{PREFIX} the stacks of all threads are in {shown_path(self._watched.kept_stacks)}"
            )
        guilty = next((one for one in others if one.has_guilty), None) if told.guilty is None else None
        if guilty is None:
            self._restart(stall, told, text)
        elif self._settings.action == "restart":
            self._print_line(f"{PREFIX} it is left to node {guilty.node_rank} to end its ranks")

    def _ask_others(self, stall: Stall, told: Account) -> list[NodeAccount]:
        board = self._watched.board
        if board is None:
            return []
        board.tell(told.text, has_guilty=told.guilty is not None)
        if told.guilty is not None:
            return []
        prefix = PREFIX if stall.is_certain else SLOW_PREFIX
        said = board.ask(_OTHERS_MAY_TAKE_S)
        if said is None:
            self._print_line(
                f"{prefix} the launcher of node 0 does not answer; see whether it runs, or is stopped"
            )
            return []
        for one in said:
            text = f"says: {one.text}" if one.text else "tells of no stall; look at the output of its ranks"
            self._print_line(f"{prefix} node {one.node_rank} {text}")
        return said

    def _account(self, views: Sequence[RankView], stacks: Mapping[int, Sequence[ThreadStack]]) -> Account:
        places: dict[int, Place] = {}
        for view in views:
            place = place_of(stacks.get(view.rank, []), view.beat.thread_id, linecache.getline)
            if place is not None and place.wait is Wait.DATA:
                place = place_in_worker(place, ask_workers(view, self._watched.stacks_files[view.rank]))
            if place is not None:
                places[view.rank] = place
        return account(views, places)

    @staticmethod
    def _account_of_save(views: Sequence[RankView], stacks: Mapping[int, Sequence[ThreadStack]]) -> Account:
        places = {rank: place for rank, threads in stacks.items() if (place := place_of_save(threads))}
        return account_of_save(views, places)

    def _restart(self, stall: Stall, told: Account, text: str) -> None:
        memory = self._watched.memory
        done = _read_positions(memory)
        if not may_restart(stall, self._settings, done, is_of_ranks=told.is_of_ranks):
            if self._settings.action == "restart" and stall.position in done:
                self._print_line(
                    f"{PREFIX} the ranks are not ended again: they were at {stall.position} before, which does not help"
                )
            return
        if memory is not None:
            with contextlib.suppress(OSError):
                memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                memory.write_text(json.dumps([*done, stall.position]), encoding="utf-8")
        self._print_line(f"{PREFIX} the ranks are ended, as data.dstrial.stall_action says")
        self._has_ended_them = True
        self._end_ranks(told.guilty, text)

    def _show(self, text: str | None) -> None:
        self._shown.show(None if text is None else {"text": text, "since_s": self._began_s})


def _farthest(beats: Iterable[Beat]) -> int:
    return max((beat.batch for beat in beats), default=0)


def _shown_stacks(
    views: Sequence[RankView], stacks: Mapping[int, Sequence[ThreadStack]], *, is_saving: bool
) -> list[str]:
    by_calls: dict[tuple[str, ...], list[RankView]] = {}
    for view in views:
        threads = stacks.get(view.rank, [])
        stack = saving_stack(threads) if is_saving else main_stack(threads, view.beat.thread_id)
        if stack is not None:
            calls = tuple(map(str, stack.frames[:_SHOWN_FRAMES]))
            by_calls.setdefault(calls, []).append(view)
    lines = []
    for calls, alike in by_calls.items():
        names = ", ".join(f"{view.rank} (process {view.pid})" for view in alike)
        lines.append(f"{PREFIX} stack of rank {names}, most recent call first:")
        lines += [f"  {call}" for call in calls]
    return lines


def _read_positions(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [str(one) for one in value] if isinstance(value, list) else []
