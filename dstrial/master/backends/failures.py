"""Explain why a trial failed, from the tracebacks in its output and its exit code."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
import signal
from collections.abc import Iterable, Sequence

_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# Frames and errors of launchers, which report that a worker failed but not why.
_LAUNCHER_FRAMES = (
    "torch/distributed/run.py",
    "torch/distributed/launcher/",
    "torch/distributed/elastic/",
    "determined/launch/",
    "determined/ipc",
    "deepspeed/launcher/",
    "dstrial/launch/__main__.py",
)
_LAUNCHER_ERRORS = ("ChildFailedError", "RankFailedError", "subprocess.CalledProcessError")
# Messages of ranks that failed because they lost the connection to another rank.
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket Timeout",
    "DistNetworkError",
    "RankTimeoutError",
    "DistBackendError: NCCL error",
)
_REPORT = re.compile(r"rank (?P<rank>\d+) failed first \(")  # dstrial.launch.failures, RankFailure.headline
# dstrial prints its own errors as a message without a traceback.
_REPORTED_MESSAGE = re.compile(
    r"^rank \d+ failed first \(.*\n((?:\w+\.)*\w*(?:Error|Exception): \S.*)", re.MULTILINE
)
_ONE = rf"{re.escape(_TRACEBACK)}\n(?:(?:[ \t].*)?\n)*\S.*"
_CHAIN = re.compile(rf"{_ONE}(?:\n+(?:{'|'.join(map(re.escape, _CHAINED))})\n+{_ONE})*")
_FRAME = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|^<|/dstrial/(?:loop|trainer|launch|trial)[/.]"
)
_VARIABLE_PARTS = re.compile(
    r"0x[0-9a-fA-F]+|/tmp/\S+|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\d+"
)
_MEANINGS = {
    126: "the entrypoint could not be executed; is the file executable?",
    127: "the entrypoint's command was not found; is it on PATH, and is the package installed?",
}
_SIGNALS = {
    signal.SIGKILL: "killed by SIGKILL: out of host memory, or killed by a user",
    signal.SIGSEGV: "SIGSEGV: invalid memory access in native code",
    signal.SIGABRT: "SIGABRT: native code aborted, see the lines above",
    signal.SIGBUS: "SIGBUS: often a full /dev/shm",
    signal.SIGTERM: "SIGTERM: terminated from outside",
    signal.SIGINT: "SIGINT: interrupted",
    signal.SIGILL: "SIGILL: this processor lacks an instruction that a package was built with",
    signal.SIGFPE: "SIGFPE: an arithmetic error in native code",
}


def explain_exit(exit_code: int, signal_number: int | None = None) -> str | None:
    """Return the meaning of an exit code; None for 0 and for ordinary codes like 1.

    If ``signal_number`` is None, the signal is derived from the code: 128 + signal (shells), or -signal modulo 256
    (Determined's ``pid_client``).
    """
    if signal_number is None and 256 - exit_code in _SIGNALS:
        signal_number = 256 - exit_code  # a negative code, truncated to eight bits
    elif signal_number is None and exit_code > 128:
        signal_number = exit_code - 128
    if signal_number is not None:
        try:
            known = signal.Signals(signal_number)
        except ValueError:
            return None
        return _SIGNALS.get(known, f"ended by {known.name}")
    return _MEANINGS.get(exit_code)


def first_traceback(lines: Iterable[tuple[int | None, str]]) -> str | None:
    """Return the traceback that best shows why a trial failed, or None.

    The result is the first traceback of the best kind, with the tracebacks that are chained to it. The kinds are, best first: a
    rank's own error; a rank's lost connection to another rank; a launcher's error. Without any traceback, a launcher's error
    message is returned. ``lines`` are (rank or None, text) in print order.
    """
    printed: dict[int | None, list[tuple[int, str]]] = {}
    for number, (rank, text) in enumerate(lines):
        printed.setdefault(rank, []).append((number, text.rstrip("\n") + "\n"))
    numbered: list[tuple[int, str]] = []
    message: re.Match[str] | None = None
    for rank, own in printed.items():
        starts = list(itertools.accumulate((len(text) for _, text in own), initial=0))
        whole = "".join(text for _, text in own)
        for found in _CHAIN.finditer(whole):
            numbered.append((own[bisect.bisect(starts, found.start()) - 1][0], found[0]))
        if rank is None:
            message = _REPORTED_MESSAGE.search(whole)
    tracebacks = [text for _, text in sorted(numbered)]
    for is_acceptable in (_is_root_cause, _is_of_user, lambda _text: True):
        chosen = next((text for text in tracebacks if is_acceptable(text)), None)
        if chosen is not None:
            return chosen
    return None if message is None else message[1]


def explain_failure(lines: Iterable[tuple[int | None, str]], traceback: str | None) -> str | None:
    """Return which rank failed, why and where, in one line; None if unknown.

    For example ``rank 1: KeyError: 'label' (model_def.py:12, in __getitem__)``. ``traceback`` is the result of
    ``first_traceback`` for the same ``lines``. If no launcher reported the failed rank, the result explains ``traceback``
    without a rank.
    """
    rank: str | None = None
    report: list[str] = []
    for tag, text in lines:
        found = _REPORT.match(text) if tag is None else None
        if found is not None:
            rank, report = found["rank"], []
        elif rank is not None and tag is None:
            report.append(text.rstrip("\n"))
    if rank is None:
        return (
            None if traceback is None or not _is_of_user(traceback) else _in_one_line(traceback.splitlines())
        )
    return f"rank {rank}: {_in_one_line(report)}" if any(report) else None


def _in_one_line(lines: Sequence[str]) -> str:
    """Return a traceback's message and innermost user frame, in one line.

    ``lines`` may have several tracebacks, of which the last counts. Without a traceback, the first non-empty line is returned.
    """
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_TRACEBACK)), None)
    if start is None:
        return next(line for line in lines if line)
    block = lines[start + 1 :]
    message = next((line for line in block if line and not line.startswith(" ")), "")
    frames = [found for found in map(_FRAME.match, block) if found is not None]
    if not frames:
        return message
    own = [frame for frame in frames if not _INSTALLED.search(frame["file"])] or frames
    name = own[-1]["file"].rpartition("/")[2]
    return f"{message} ({name}:{own[-1]['line']}, in {own[-1]['function']})"


def _is_of_user(traceback: str) -> bool:
    last = traceback.rpartition("\n")[2]
    frames = [line for line in traceback.splitlines() if line.lstrip().startswith('File "')]
    is_launcher = bool(frames) and any(part in frames[-1] for part in _LAUNCHER_FRAMES)
    return not is_launcher and not any(error in last for error in _LAUNCHER_ERRORS)


def _is_root_cause(traceback: str) -> bool:
    return _is_of_user(traceback) and not any(words in traceback for words in _CONSEQUENCES)


def fingerprint(traceback: str) -> str:
    """Return a hash by which the same failure of several runs is recognised.

    The hash ignores the traceback's numbers, temporary paths and ids.
    """
    return hashlib.sha256(_VARIABLE_PARTS.sub("#", traceback).encode()).hexdigest()
