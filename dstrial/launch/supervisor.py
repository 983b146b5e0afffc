"""Supervise the ranks of a launch: reap, find the first failure, send signals.

A stop request is sent to the ranks only, not to their process groups: a graceful stop still needs data loader workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dstrial.launch.failures import (
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

DEFAULT_FAILURE_GRACE_S = 10.0
"""Grace period from the first failure until the other ranks are killed, seconds."""

# Ranks that lost a peer mostly exit by themselves in this time; the others are then asked to stop.
_UNTOLD_GRACE_S = 2.0

_TRACKER = b"from multiprocessing.resource_tracker import main;main("
# A resource tracker may still be starting when its process is killed.
_TRACKER_TIMEOUT_S = 5.0


class Supervisor:
    """Supervises the rank processes of one launch on this machine.

    ``tick`` is called every 50 ms, ``request_stop`` by signal handlers. ``shutdown_timeout_s`` after a stop request or
    ``failure_grace_s`` after the first failure, ranks that still run are killed.
    """

    def __init__(
        self, *, shutdown_timeout_s: float, failure_grace_s: float, on_stop: Callable[[str], None] | None
    ) -> None:
        self._shutdown_timeout_s = shutdown_timeout_s
        self._failure_grace_s = failure_grace_s
        self._on_stop = on_stop
        self._ranks: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._error_files: dict[int, Path] = {}
        self._stderr_files: dict[int, Path] = {}
        self._exit_problem: dict[int, Callable[[], str]] = {}
        self._left: dict[int, str] = {}
        self._ended: dict[int, tuple[float, int]] = {}
        self._term_sent_s: dict[int, float] = {}
        self._kill_sent: set[int] = set()
        self._end_left: set[int] = set()
        self._stop_signal: str | None = None
        self._stop_passed_on_s: float | None = None
        self._kill_requested = self._killed_by_user = False
        self._failing_since_s: float | None = None
        self._oom_kills_before = oom_kills()

    def set_files(
        self, local_rank: int, *, error_file: Path, stderr_file: Path | None, exit_problem: Callable[[], str]
    ) -> None:
        """Set a rank's files.

        ``exit_problem`` returns why exit code 0 counts as a failure; empty if it does not.
        """
        self._error_files[local_rank] = error_file
        self._exit_problem[local_rank] = exit_problem
        if stderr_file is not None:
            self._stderr_files[local_rank] = stderr_file

    def watch(self, local_rank: int, rank: int, pid: int) -> None:
        """Add a rank: a child of this process that is the leader of its own session."""
        self._ranks[local_rank] = rank
        self._pids[local_rank] = pid
        threading.Thread(
            target=self._await_end, args=(local_rank, pid), name=f"dstrial-rank-{rank}-waiter", daemon=True
        ).start()

    def end_left(self, local_rank: int) -> None:
        """Kill a rank whose program has finished but does not exit; its exit code stays 0."""
        if local_rank not in self._ended:
            self._end_left.add(local_rank)
            _kill_group(self._pids[local_rank])

    def request_stop(self, signal_: signal.Signals) -> None:
        """Ask all ranks to stop gracefully; a SIGINT after the first request kills them."""
        if self._stop_signal is None:
            self._stop_signal = signal_.name
        elif signal_ == signal.SIGINT:
            self._kill_requested = self._killed_by_user = True

    @property
    def stop_signal(self) -> str | None:
        return self._stop_signal

    @property
    def was_killed_by_user(self) -> bool:
        return self._killed_by_user

    def tick(self) -> bool:
        """Reap and signal ranks as needed; return whether all ranks have ended."""
        alive = [local_rank for local_rank in self._pids if local_rank not in self._ended]
        if not alive:
            return True
        now_s = time.monotonic()
        if self._stop_signal is not None and self._stop_passed_on_s is None:
            self._stop_passed_on_s = now_s
            self._terminate(alive)
            if self._on_stop is not None:
                self._on_stop(self._stop_signal)
        if self._failing_since_s is None and self._has_failure():
            self._failing_since_s = now_s
        if self._failing_since_s is not None and now_s > self._failing_since_s + _UNTOLD_GRACE_S:
            self._terminate([local_rank for local_rank in alive if local_rank not in self._term_sent_s])
        if self._kill_requested or self._is_past_a_deadline(now_s):
            self._kill(alive)
        return False

    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes by local rank, as in a shell."""
        return tuple(shell_exit_code(self._ended[local_rank][1]) for local_rank in sorted(self._ended))

    def killed_ranks(self) -> tuple[int, ...]:
        """The global ranks that were killed without an earlier failure of their own."""
        return tuple(sorted(self._ranks[i] for i in self._kill_sent if self._ended[i][1] == -signal.SIGKILL))

    def first_ending(self) -> RankEnding | None:
        """Return the failure that caused the others; None if only our signals ended ranks."""
        endings = (self._ending(local_rank) for local_rank in sorted(self._ended))
        first = first_ending(ending for ending in endings if ending is not None)
        if first is None or not first.is_consequence:
            return first
        # After a stop request, a rank without a trained batch exits at once, and a collective of other ranks may fail.
        if self._stop_signal is not None and any(
            status == -signal.SIGTERM for _, status in self._ended.values()
        ):
            return None
        left = [(self._ended[i][0], i) for i in self._ended if self._has_left(i)]
        if not left:
            return first
        ended_s, local_rank = min(left)
        text = "It ended while other ranks waited for it. Let all ranks end together."
        return RankEnding(self._failure(local_rank, 0, text), ended_s, is_consequence=True)

    def _ending(self, local_rank: int) -> RankEnding | None:
        ended_s, status = self._ended[local_rank]
        record = read_record(self._error_files[local_rank])
        # The sender may signal the ranks too: systemd and Slurm signal all processes of a job.
        is_stopped = self._stop_signal is not None or local_rank in self._term_sent_s
        ours = (status == -signal.SIGTERM and is_stopped) or (
            status == -signal.SIGKILL and local_rank in self._kill_sent
        )
        if status == 0 and record is None:
            why = self._left.get(local_rank)
            return RankEnding(self._failure(local_rank, 0, why), ended_s, False) if why else None
        if status == 0 or (ours and record is None):
            return None
        is_caused = is_consequence(record)
        told: dict[str, Any] = {}
        if record is None:
            if status == -signal.SIGKILL:
                told["advice"] = killed_text(self._oom_kills_before)
            stderr_file = self._stderr_files.get(local_rank)
            error = tail(stderr_file) if stderr_file is not None else ""
            # A C++ stack of dozens of frames follows the message.
            printed = tail(stderr_file, num_lines=400) if stderr_file is not None else ""
            is_caused = is_watchdog_abort(signal_name(status), printed)
        else:
            error = record.text
            told = {"summary": record.line, "advice": record.advice, "whole": record.whole}
        if ours:
            status = 1
        failure = self._failure(local_rank, status, error, **told)
        return RankEnding(failure, ended_s if record is None else record.time_s, is_caused)

    def _failure(self, local_rank: int, status: int, error: str, **told: Any) -> RankFailure:
        return RankFailure(
            rank=self._ranks[local_rank],
            local_rank=local_rank,
            pid=self._pids[local_rank],
            exit_code=shell_exit_code(status),
            signal_name=signal_name(status),
            host=socket.gethostname(),
            error=error,
            **told,
        )

    def _has_left(self, local_rank: int) -> bool:
        return self._ended[local_rank][1] == 0 and local_rank not in self._term_sent_s

    def _await_end(self, local_rank: int, pid: int) -> None:
        try:
            # WNOWAIT does not reap the rank, so that its pid still identifies its process group below.
            result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            result = None
        ended_s = time.time()
        if result is None:
            status = 255
        else:
            status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            _kill_group(pid)
            give_up_at_s = time.monotonic() + _TRACKER_TIMEOUT_S
            while time.monotonic() < give_up_at_s and _kill_group(pid):
                time.sleep(0.02)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if status == -signal.SIGKILL and local_rank in self._end_left:
            status = 0
        if status == 0 and local_rank not in self._term_sent_s:
            self._left[local_rank] = self._exit_problem[local_rank]()
        self._ended[local_rank] = (ended_s, status)

    def _has_failure(self) -> bool:
        if any(status != 0 for _, status in self._ended.values()) or any(self._left.values()):
            return True
        return any(path.exists() for path in self._error_files.values())

    def _is_past_a_deadline(self, now_s: float) -> bool:
        if self._stop_passed_on_s is not None and now_s > self._stop_passed_on_s + self._shutdown_timeout_s:
            return True
        return self._failing_since_s is not None and now_s > self._failing_since_s + self._failure_grace_s

    def _terminate(self, local_ranks: list[int]) -> None:
        for local_rank in local_ranks:
            self._term_sent_s[local_rank] = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[local_rank], signal.SIGTERM)

    def _kill(self, local_ranks: list[int]) -> None:
        for local_rank in local_ranks:
            if local_rank not in self._kill_sent:
                self._kill_sent.add(local_rank)
                _kill_group(self._pids[local_rank])


def _kill_group(group: int) -> bool:
    """Kill a process group except resource trackers; return whether one still runs.

    Trackers delete the other processes' semaphores and shared memory, then exit.
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
