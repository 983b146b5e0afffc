"""Error records of failed ranks, the root cause among them, and launch outcomes.

A rank's error record has the format of torchrun's error files, so that torchrun and dstrial can read each other's records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dstrial.launch.tracebacks import MAX_LINE_CHARS, MAX_SHOWN_CHARS, whole_traceback
from dstrial.local.run_directory import shown_path
from dstrial.visible_text import cut_text

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"

TRACEBACKS_DIR_VARIABLE = "DSTRIAL_TRACEBACKS_DIR"
"""Environment variable with a master's directory for traceback files, for runs without a log directory."""

TRACEBACK_FILE_VARIABLE = "DSTRIAL_TRACEBACK_FILE"
"""Environment variable with the file to which a rank writes its full traceback, if only a short one is shown."""

# Messages of gloo, NCCL and the c10d store in a rank whose peer has exited. Compared in lower case.
# Source: torch 2.13 torch/csrc/distributed/c10d, ProcessGroupNCCL.cpp and NCCLUtils.cpp; NCCL's ncclRemoteError.
_PEER_ERROR_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "remote process exited or there was a network error",
    "a remote process exiting prematurely",
    # ProcessGroupNCCL: the communicator was aborted, by a rank or its watchdog, because peers were missing.
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "some nccl operations have failed or timed out",
    "received a dump signal due to a collective timeout from",
    "a peer of this rank exited",
)


@dataclasses.dataclass(frozen=True, slots=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        exit_code: as in a shell, 128 + n for signal n.
        error: the recorded traceback, else the end of standard error.
        summary: the error's message in one line.
        advice: a hint for the user; "" if there is none.
        whole: path of the file with the full traceback; "" if there is none.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    signal_name: str | None
    host: str
    error: str
    summary: str = ""
    advice: str = ""
    whole: str = ""
    batches_trained: int | None = None

    @property
    def headline(self) -> str:
        """One line: which rank failed, with exit code or signal, and host."""
        how = f"killed by {self.signal_name}" if self.signal_name else f"exit code {self.exit_code}"
        return f"rank {self.rank} failed first ({how}, host {self.host}):"

    @property
    def in_one_line(self) -> str:
        """The headline, followed by the error's message."""
        lines = self.error.rstrip().splitlines()
        named = self.summary or (lines[-1] if lines else "")
        return f"{self.headline} {named}" if named else self.headline.rstrip(":")

    def describe(self) -> str:
        """The headline, the full traceback's file, the error and a hint, on several lines."""
        parts = [self.headline]
        if self.whole:
            parts = [f"{self.headline.rstrip(':')}, whole traceback in {shown_path(Path(self.whole))}:"]
        if self.error:
            parts.append(self.error.rstrip())
        elif not self.advice and self.signal_name == "SIGKILL":
            parts.append("It left no traceback. The kernel kills a process like this when memory runs out.")
        elif not self.advice:
            parts.append("It left no traceback. Look at what it printed above.")
        return "\n".join([*parts, self.advice] if self.advice else parts)


@dataclasses.dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The record that a rank wrote of the exception that ended the rank.

    Attributes:
        summary: type and message of the exception.
        text: the traceback to show.
        time_s: time of the failure, seconds since the epoch.
        line: type and message in one line; empty in records of other programs.
        advice: a hint for the user; "" if there is none.
        whole: path of the file with the full traceback; "" if there is none.
    """

    summary: str
    text: str
    time_s: float
    line: str = ""
    advice: str = ""
    whole: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RankEnding:
    """A rank's failure, which may be the root cause of a launch's failure.

    Attributes:
        failure: the failure to report.
        time_s: time of the failure, seconds since the epoch.
        is_consequence: whether the rank failed only because another rank exited.
    """

    failure: RankFailure
    time_s: float
    is_consequence: bool


def first_ending(endings: Iterable[RankEnding]) -> RankEnding | None:
    """Return the failure that caused the others; None if no rank failed.

    This is the earliest failure that is not a consequence of another; if all are consequences, the earliest failure. (A failing
    rank closes its connections early, so its peers may fail and write their records first.)
    """
    ordered = sorted(endings, key=lambda ending: (ending.is_consequence, ending.time_s))
    return ordered[0] if ordered else None


def record_exception(error: BaseException, text: str | None = None, **fields: str) -> bool:
    """Write this rank's error record, unless the rank already has one.

    ``text`` defaults to the full traceback; ``fields`` may have ``line``, ``advice`` and ``whole`` of ``ErrorRecord``. Returns
    False, without writing, if no launcher started this rank; else True.
    """
    path_text = os.environ.get(ERROR_FILE_VARIABLE)
    if not path_text:
        return False
    write_record(Path(path_text), error, whole_traceback(error) if text is None else text, **fields)
    return True


def write_record(path: Path, error: BaseException, text: str, **fields: str) -> None:
    """Write a rank's error record unless it exists; truncate long texts.

    ``text`` is the traceback; ``fields`` may have ``line``, ``advice`` and ``whole`` of ``ErrorRecord``.
    """
    now_s = time.time()
    document = {
        "message": {
            "message": cut_text(f"{type(error).__name__}: {error}", MAX_LINE_CHARS),
            "extraInfo": {
                "py_callstack": cut_text(text, MAX_SHOWN_CHARS),
                "timestamp": str(int(now_s)),
                "time_s": now_s,
                **fields,
            },
        }
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(document))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()


def keep_whole_traceback(text: str) -> str:
    """Write a full traceback to the file that the launcher named; return its path.

    Return "" if the launcher named no file or the file cannot be written; the caller then prints the full traceback.
    """
    named = os.environ.get(TRACEBACK_FILE_VARIABLE)
    if not named:
        return ""
    path = Path(named)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w", errors="replace"
        ) as file:
            file.write(text)
    except OSError:
        return ""
    return named


def read_record(path: Path) -> ErrorRecord | None:
    """Read an error record of dstrial or torchrun; None if missing or unreadable."""
    try:
        message = json.loads(path.read_text(errors="replace"))["message"]
        if isinstance(message, str):
            return ErrorRecord(message, message, path.stat().st_mtime)
        extra = message["extraInfo"]
        time_s = float(extra["time_s"] if "time_s" in extra else extra["timestamp"])
        ours = {name: str(extra.get(name) or "") for name in ("line", "advice", "whole")}
        return ErrorRecord(str(message["message"]), str(extra["py_callstack"]), time_s, **ours)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_consequence(record: ErrorRecord | None) -> bool:
    """Return whether a rank's record reports only another rank's exit; False for None."""
    return record is not None and is_peer_error(record.summary)


def is_watchdog_abort(signal_name: str | None, stderr_text: str) -> bool:
    """Return whether NCCL's watchdog aborted a rank that waited for missing peers.

    The watchdog throws in a C++ thread, which ends the process by SIGABRT; only standard error shows the cause.
    """
    return signal_name == "SIGABRT" and is_peer_error(stderr_text)


def is_peer_error(error_text: str) -> bool:
    """Return whether an error's message only reports that another rank has exited.

    ``error_text`` must have no traceback, whose source lines could contain the same phrases.
    """
    lowered = error_text.lower()
    return any(phrase in lowered for phrase in _PEER_ERROR_PHRASES)


def signal_name(status: int) -> str | None:
    """Return the signal's name for a negative ``subprocess`` return code; else None."""
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def shell_exit_code(status: int) -> int:
    """Convert a ``subprocess`` return code to a shell's exit code."""
    return 128 - status if status < 0 else status


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """The result of one launch.

    Attributes:
        exit_code: 0 only if every rank exited 0; 130 after a second Ctrl-C; else the exit code of the first failing
            rank, or of a killed rank (128 + n for signal n).
        first_failure: the failure that caused the others; None if no rank failed by itself.
        exit_codes: exit code of each local rank, as in a shell.
        stopped_by: name of the stop signal; None if there was none.
        killed_ranks: global ranks that were killed because they did not exit in time.
        ended_at_once: whether a second Ctrl-C killed the ranks.
        is_consequence: whether the first failure only reports that a rank on another machine has exited.
        failed_s: time of the first failure, seconds since the epoch.
    """

    exit_code: int
    first_failure: RankFailure | None
    exit_codes: tuple[int, ...]
    stopped_by: str | None
    killed_ranks: tuple[int, ...]
    ended_at_once: bool = False
    is_consequence: bool = False
    failed_s: float | None = None

    @property
    def killed_text(self) -> str:
        """A text that lists killed ranks; "" if there are none or after a second Ctrl-C."""
        if not self.killed_ranks or self.ended_at_once:
            return ""
        return f"rank(s) {', '.join(map(str, self.killed_ranks))} did not end in time and were killed"

    def describe(self) -> str:
        """Return text about killed ranks and the first failure; empty if there are none."""
        lines = [f"{self.killed_text}\n"] if self.killed_text else []
        if self.first_failure is not None:
            lines.append(f"{self.first_failure.describe()}\n")
        return "".join(lines)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LaunchOutcome:
        failure = fields["first_failure"]
        given = {
            "first_failure": None if failure is None else RankFailure(**failure),
            "exit_codes": tuple(fields["exit_codes"]),
            "killed_ranks": tuple(fields["killed_ranks"]),
        }
        return cls(**{**fields, **given})
