"""What a failed rank leaves behind, who failed first, and how a launch ended.

A rank writes an error record, in the format of torchrun's error files, so that records are also
understood under a foreign torchrun and those of ``torch.distributed.elastic...record`` are here.
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
"""Environment variable by which a master names the directory for the traceback files of a run that keeps no others."""

TRACEBACK_FILE_VARIABLE = "DSTRIAL_TRACEBACK_FILE"
"""Environment variable that names the file in which a rank leaves the whole of a traceback that is shown shortened."""

# What gloo, NCCL and the c10d store say in a rank whose peer went away. Compared in lower case.
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
    # ProcessGroupNCCL's: the communicator was taken down, here or by its watchdog, because others did not come.
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "some nccl operations have failed or timed out",
    "received a dump signal due to a collective timeout from",
    "a peer of this rank exited",
)


@dataclasses.dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed.

    ``exit_code`` is a shell's: 128 + n for signal n. ``error`` is the recorded traceback, else the end of its standard error;
    ``whole`` the path of the whole one.
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
        """One line that names the rank and how it ended."""
        how = f"killed by {self.signal_name}" if self.signal_name else f"exit code {self.exit_code}"
        return f"rank {self.rank} failed first ({how}, host {self.host}):"

    @property
    def in_one_line(self) -> str:
        """The headline and the line of the error that names it."""
        lines = self.error.rstrip().splitlines()
        named = self.summary or (lines[-1] if lines else "")
        return f"{self.headline} {named}" if named else self.headline.rstrip(":")

    def describe(self) -> str:
        """The headline, the file of the whole traceback, and below: the error, what to do."""
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
    """What a rank wrote about the exception that ended it.

    ``line`` is empty in records of others. ``whole`` is the path of the whole traceback.
    """

    summary: str
    text: str
    time_s: float
    line: str = ""
    advice: str = ""
    whole: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RankEnding:
    """One failed rank as the launcher saw it, before it is known which one was first.

    Attributes:
        failure: what to tell.
        time_s: when it failed, seconds since the epoch.
        is_consequence: it failed because another rank went away.
    """

    failure: RankFailure
    time_s: float
    is_consequence: bool


def first_ending(endings: Iterable[RankEnding]) -> RankEnding | None:
    """Pick the failure that caused the others; None without any.

    The earliest that is no mere consequence: a rank that closes its connections while it unwinds makes
    its peers fail, and record that, before its own record is complete.
    """
    ordered = sorted(endings, key=lambda ending: (ending.is_consequence, ending.time_s))
    return ordered[0] if ordered else None


def record_exception(
    error: BaseException, text: str | None = None, *, line: str = "", advice: str = "", whole: str = ""
) -> bool:
    """Write this rank's error record if there is none; say whether one is asked for.

    The others are fields of ``ErrorRecord``; ``text`` is the whole traceback of ``error`` if None.
    """
    path_text = os.environ.get(ERROR_FILE_VARIABLE)
    if not path_text:
        return False
    write_record(
        Path(path_text),
        error,
        whole_traceback(error) if text is None else text,
        line=line,
        advice=advice,
        whole=whole,
    )
    return True


def write_record(
    path: Path, error: BaseException, text: str, *, line: str = "", advice: str = "", whole: str = ""
) -> None:
    """Write a rank's error record, long texts cut, if there is none."""
    now_s = time.time()
    document = {
        "message": {
            "message": cut_text(f"{type(error).__name__}: {error}", MAX_LINE_CHARS),
            "extraInfo": {
                "py_callstack": cut_text(text, MAX_SHOWN_CHARS),
                "timestamp": str(int(now_s)),
                "time_s": now_s,
                "line": line,
                "advice": advice,
                "whole": whole,
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


def keep_whole(text: str) -> str:
    """Write a whole traceback into the launcher's private file; return its path.

    Empty if none is named or it cannot be written: the whole is then to be shown.
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
    """Read an error record of ours or torchrun's; None if no readable record is there."""
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
    """Say whether a record tells of a lost peer, not of a fault of its own rank."""
    return record is not None and is_peer_error(record.summary)


def is_watchdog_abort(signal_name: str | None, stderr_text: str) -> bool:
    """Say whether NCCL's watchdog ended a rank, because others came to no collective.

    It throws in a thread of C++, which ends the process by SIGABRT: there is no exception that Python could record, only the
    end of standard error.
    """
    return signal_name == "SIGABRT" and is_peer_error(stderr_text)


def is_peer_error(error_text: str) -> bool:
    """Say whether a message, no traceback, merely reports that a peer went away."""
    lowered = error_text.lower()
    return any(phrase in lowered for phrase in _PEER_ERROR_PHRASES)


def signal_name(status: int) -> str | None:
    """Return the signal of a negative return code of ``subprocess``, None for others."""
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def shell_exit_code(status: int) -> int:
    """Turn a return code of ``subprocess`` into what a shell would report."""
    return 128 - status if status < 0 else status


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How the ranks of one launch ended.

    Attributes:
        exit_code: 0 only if every rank exited 0; 130 after a second Ctrl-C; else that of the first failing
            rank, or of one that had to be ended (128 + n for signal n).
        first_failure: the failure that caused the others; None if no rank failed by itself.
        exit_codes: by local rank, as a shell sees them.
        stopped_by: name of the signal that asked for a stop, None if none did.
        killed_ranks: global ranks that did not end by themselves in time and were killed.
        ended_at_once: whether a second Ctrl-C ended the ranks.
        is_consequence: whether the first failure only reports that a rank elsewhere went away.
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

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LaunchOutcome:
        """Return what ``to_json`` was called on."""
        failure = fields["first_failure"]
        return cls(
            exit_code=fields["exit_code"],
            first_failure=None if failure is None else RankFailure(**failure),
            exit_codes=tuple(fields["exit_codes"]),
            stopped_by=fields["stopped_by"],
            killed_ranks=tuple(fields["killed_ranks"]),
            ended_at_once=fields["ended_at_once"],
            is_consequence=fields["is_consequence"],
            failed_s=fields["failed_s"],
        )
