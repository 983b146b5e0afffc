"""Supervise the ranks of a launch: reap, find the first failure, send signals.

A stop request goes to the ranks only, not to their process groups: a graceful stop still needs data loader workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dstrial.launch.failures import (
    LaunchOutcome,
    RankEnding,
    RankFailure,
    first_ending,
    is_consequence,
    is_watchdog_abort,
    read_record,
    shell_exit_code,
    signal_name,
)
from dstrial.launch.memory_shortage import killed_text, oom_kills
from dstrial.launch.output import tail

_FAILURE_GRACE_S = 10.0  # from the first failure until the other ranks are killed
# Time after the first failure in which the other ranks may notice the lost peer and exit, before they get SIGTERM.
_PEER_EXIT_GRACE_S = 2.0
# Part of the command line of Python's resource tracker.
_TRACKER = b"from multiprocessing.resource_tracker import main;main("
# A resource tracker may still be starting when its process is killed.
_TRACKER_TIMEOUT_S = 5.0


@dataclasses.dataclass(slots=True)
class RankProcess:
    """One rank's process on this machine, with its files and its exit status.

    ``exit_problem()`` returns why exit code 0 of this rank counts as a failure; empty if it does not.
    """

    rank: int
    local_rank: int
    error_file: Path
    stderr_file: Path | None
    exit_problem: Callable[[], str]
    pid: int = 0
    ended_s: float | None = None  # seconds since the epoch; None while it runs
    status: int = 0  # exit code, or -n for signal n; valid once it has ended
    problem: str = ""  # what ``exit_problem`` returned
    was_asked_to_stop: bool = False
    was_killed: bool = False
    is_finished: bool = False  # the rank's program had ended, but its process did not exit and was killed


class Supervisor:
    """Supervises the rank processes of one launch on this machine.

    ``tick`` is called every 50 ms, ``request_stop`` by signal handlers. A stop request sends SIGTERM to all ranks; so does the
    first failure, after 2 seconds. Ranks that still run ``shutdown_timeout_s`` after a stop request, or 10 seconds after the
    first failure, are killed. ``on_stop`` is called with the signal's name at a stop request.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        *,
        shutdown_timeout_s: float,
        on_stop: Callable[[str], None] | None,
    ) -> None:
        self._ranks = ranks
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_stop = on_stop
        self._requested: str | None = None  # name of the first stop signal
        self._stopping_since_s: float | None = None
        self._failing_since_s: float | None = None
        self._was_killed_by_user = False
        self._oom_kills_before = oom_kills()

    def watch(self) -> None:
        """Start a thread for each rank; it waits for the exit of the rank's process."""
        for rank in self._ranks:
            name = f"dstrial-rank-{rank.rank}-waiter"
            threading.Thread(target=self._await_end, args=(rank,), name=name, daemon=True).start()

    def end_finished(self, local_rank: int) -> None:
        """Kill a rank whose program has ended but whose process hangs.

        The rank counts as exited with code 0.
        """
        rank = self._ranks[local_rank]
        if rank.ended_s is None:
            rank.is_finished = True
            _kill_group(rank.pid)

    def request_stop(self, signal_: signal.Signals) -> None:
        """Ask all ranks to stop gracefully; a SIGINT after the first request kills them."""
        if self._requested is None:
            self._requested = signal_.name
        elif signal_ == signal.SIGINT:
            self._was_killed_by_user = True

    def tick(self) -> bool:
        """Send signals that are due (stop, kill); return whether all ranks have ended."""
        alive = [rank for rank in self._ranks if rank.ended_s is None]
        if not alive:
            return True
        now_s = time.monotonic()
        if self._requested is not None and self._stopping_since_s is None:
            self._stopping_since_s = now_s
            _terminate(alive)
            if self._on_stop is not None:
                self._on_stop(self._requested)
        if self._failing_since_s is None and any(map(_has_failed, self._ranks)):
            self._failing_since_s = now_s
        if self._failing_since_s is not None and now_s > self._failing_since_s + _PEER_EXIT_GRACE_S:
            _terminate([rank for rank in alive if not rank.was_asked_to_stop])
        deadlines_s = [
            since_s + timeout_s
            for since_s, timeout_s in (
                (self._stopping_since_s, self._shutdown_timeout_s),
                (self._failing_since_s, _FAILURE_GRACE_S),
            )
            if since_s is not None
        ]
        if self._was_killed_by_user or any(now_s > deadline_s for deadline_s in deadlines_s):
            for rank in alive:
                if not rank.was_killed:
                    rank.was_killed = True
                    _kill_group(rank.pid)
        return False

    def outcome(self) -> LaunchOutcome:
        """Return the launch's outcome; call it when all ranks have ended."""
        ending = self._first_ending()
        failure = None if ending is None else ending.failure
        exit_codes = tuple(shell_exit_code(rank.status) for rank in self._ranks)
        if self._was_killed_by_user:
            exit_code = 130
        elif failure is not None:
            exit_code = failure.exit_code or 1
        else:
            exit_code = max(exit_codes, default=0)
        return LaunchOutcome(
            exit_code,
            failure,
            exit_codes,
            stopped_by=self._requested,
            # Excludes ranks that failed by themselves before the kill.
            killed_ranks=tuple(
                rank.rank for rank in self._ranks if rank.was_killed and rank.status == -signal.SIGKILL
            ),
            ended_at_once=self._was_killed_by_user,
            is_consequence=ending is not None and ending.is_consequence,
            failed_s=None if ending is None else ending.time_s,
        )

    def _first_ending(self) -> RankEnding | None:
        endings = [ending for rank in self._ranks if (ending := self._ending(rank)) is not None]
        first = first_ending(endings)
        if first is None or not first.is_consequence:
            return first
        # After a stop request, a rank without a trained batch exits at once, and a collective of other ranks may fail.
        if self._requested is not None and any(rank.status == -signal.SIGTERM for rank in self._ranks):
            return None
        left = [rank for rank in self._ranks if rank.status == 0 and not rank.was_asked_to_stop]
        if not left:
            return first
        earliest = min(left, key=lambda rank: (rank.ended_s, rank.local_rank))
        text = "It ended while other ranks waited for it. Let all ranks end together."
        return RankEnding(_failure(earliest, 0, text), earliest.ended_s or 0.0, is_consequence=True)

    def _ending(self, rank: RankProcess) -> RankEnding | None:
        status, ended_s, record = rank.status, rank.ended_s or 0.0, read_record(rank.error_file)
        # systemd and Slurm signal all processes of a job: a rank may get SIGTERM from them, too.
        is_stopped = self._requested is not None or rank.was_asked_to_stop
        ours = (status == -signal.SIGTERM and is_stopped) or (status == -signal.SIGKILL and rank.was_killed)
        if record is not None:
            fields = {"summary": record.line, "advice": record.advice, "whole": record.whole}
            if status == 0:
                return None
            failure = _failure(rank, 1 if ours else status, record.text, **fields)
            return RankEnding(failure, record.time_s, is_consequence(record))
        if status == 0:
            return RankEnding(_failure(rank, 0, rank.problem), ended_s, False) if rank.problem else None
        if ours:
            return None
        # A C++ stack of dozens of frames follows the message of NCCL's watchdog.
        error, printed = "", ""
        if rank.stderr_file is not None:
            error, printed = tail(rank.stderr_file), tail(rank.stderr_file, num_lines=400)
        advice = killed_text(self._oom_kills_before) if status == -signal.SIGKILL else ""
        is_caused = is_watchdog_abort(signal_name(status), printed)
        return RankEnding(_failure(rank, status, error, advice=advice), ended_s, is_caused)

    def _await_end(self, rank: RankProcess) -> None:
        try:
            # WNOWAIT does not reap the rank, so that its pid still identifies its process group below.
            result = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            result = None
        ended_s = time.time()
        if result is None:
            status = 255
        else:
            status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            give_up_at_s = time.monotonic() + _TRACKER_TIMEOUT_S
            while _kill_group(rank.pid) and time.monotonic() < give_up_at_s:
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
        if status == -signal.SIGKILL and rank.is_finished:
            status = 0
        if status == 0 and not rank.was_asked_to_stop:
            rank.problem = rank.exit_problem()
        rank.status = status
        rank.ended_s = ended_s  # last: other threads read the fields above once it is set


def _has_failed(rank: RankProcess) -> bool:
    has_ended_badly = rank.ended_s is not None and (rank.status != 0 or bool(rank.problem))
    return has_ended_badly or rank.error_file.exists()


def _failure(rank: RankProcess, status: int, error: str, **fields: Any) -> RankFailure:
    return RankFailure(
        rank=rank.rank,
        local_rank=rank.local_rank,
        pid=rank.pid,
        exit_code=shell_exit_code(status),
        signal_name=signal_name(status),
        host=socket.gethostname(),
        error=error,
        **fields,
    )


def _terminate(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        rank.was_asked_to_stop = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, signal.SIGTERM)


def _kill_group(group: int) -> bool:
    """Kill a process group except resource trackers; return whether a tracker runs.

    Resource trackers of multiprocessing delete the other processes' semaphores and shared memory, then exit.
    """
    has_tracker = False
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
            # A process is also a zombie if only its main thread has ended; its thread count shows that (proc(5)).
            has_ended = fields[0] == b"X" or (fields[0] == b"Z" and int(fields[17]) <= 1)
            if int(fields[2]) != group or has_ended:
                continue
            if _TRACKER in (entry / "cmdline").read_bytes():
                has_tracker = True
            else:
                os.kill(int(entry.name), signal.SIGKILL)
    return has_tracker
