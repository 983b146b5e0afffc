"""Asks ranks for their Python stacks by a signal, and reads what they write.

Only processes get it that catch it: any other would be ended.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrial.launch.stalls.stacks import ThreadStack, parse_stacks
from dstrial.launch.stalls.stall_rules import RankView
from dstrial.process_state import catches, children, has_open, start_ticks
from dstrial.ranks.stack_dump import STACKS_SIGNAL

_DEADLINE_S = 5.0
_QUIET_S = 0.15
_MOST_WORKERS = 8


def ask_for_stacks(
    views: Sequence[RankView], files: Mapping[int, Path], kept: Path | None
) -> dict[int, list[ThreadStack]]:
    """Return the stacks of ranks that can write them now, within five seconds."""
    asked: dict[int, tuple[Path, int]] = {}
    for view in views:
        path = files.get(view.rank)
        if path is None or view.is_stopped or view.is_uninterruptible:
            continue
        # A pid may be another process's by now.
        if catches(view.pid, STACKS_SIGNAL) and start_ticks(view.pid) == view.beat.start_ticks:
            size = _size(path)
            with contextlib.suppress(OSError):
                os.kill(view.pid, STACKS_SIGNAL)
                asked[view.rank] = (path, size)
    texts = _await_texts(asked)
    if kept is not None:
        for rank, text in texts.items():
            _keep(kept / f"rank_{rank}.stacks.txt", text)
    return {rank: parse_stacks(text) for rank, text in texts.items()}


def ask_workers(view: RankView, path: Path) -> dict[int, list[ThreadStack]]:
    """Return the stacks of a rank's forks, such as loader workers, by pid.

    They write into the rank's file.
    """
    found: dict[int, list[ThreadStack]] = {}
    for pid in children(view.pid)[:_MOST_WORKERS]:
        # One that is no fork of the rank may catch the signal for something else.
        if not (catches(pid, STACKS_SIGNAL) and has_open(pid, path)):
            continue
        size = _size(path)
        with contextlib.suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
            found[pid] = parse_stacks(_await_texts({view.rank: (path, size)}).get(view.rank, ""))
    return found


def _await_texts(asked: Mapping[int, tuple[Path, int]]) -> dict[int, str]:
    """Return what is appended to files beyond a size, once they grow no more."""
    give_up_at_s = time.monotonic() + _DEADLINE_S
    sizes = {rank: size for rank, (_, size) in asked.items()}
    quiet_since_s = time.monotonic()
    while asked and time.monotonic() < give_up_at_s:
        time.sleep(0.02)
        now = {rank: _size(path) for rank, (path, _) in asked.items()}
        if now != sizes:
            sizes, quiet_since_s = now, time.monotonic()
        has_all = all(sizes[rank] > size for rank, (_, size) in asked.items())
        if has_all and time.monotonic() - quiet_since_s >= _QUIET_S:
            break
    found = {}
    for rank, (path, size) in asked.items():
        with contextlib.suppress(OSError):
            text = path.read_bytes()[size:].decode(errors="replace")
            if text:
                found[rank] = text
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _keep(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
