"""Format short tracebacks: frames of user code, with counts of other frames."""

from __future__ import annotations

import dataclasses
import re
import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import dstrial
from dstrial.errors import DstrialError
from dstrial.visible_text import cut_text

# Limits of a shown text: a message may contain a whole tensor or file. All ranks, the log and the run record get a copy.
MAX_SHOWN_CHARS = 1 << 16
MAX_LINE_CHARS = 1 << 11
_MAX_WHOLE_CHARS = 1 << 20

_OURS = str(Path(dstrial.__file__).parent)
_STANDARD_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\]+)")
_MAX_USER_FRAMES = 16  # of a traceback with more frames of user code, the first and last 8 are shown
_INNERMOST = 2  # number of innermost frames that are shown of a traceback without user code
_BECAUSE = "The above exception was the direct cause of the following exception:"
_MEANWHILE = "During handling of the above exception, another exception occurred:"
# torch 2.13 torch/_utils.py, ExceptionWrapper: the form of an exception from a DataLoader's worker or pinning thread.
_WORKER_ERROR = re.compile(
    r"\A[\w.]*: ?['\"]?Caught \w+ in (?P<where>[^\n]+)\.\nOriginal (?P<text>Traceback .*)", re.DOTALL
)
_LINE = re.compile(r'", line (\d+), in ')
_FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line \d+, in [^\n]*\n(?:    [^\n]*\n?)*')


@dataclasses.dataclass(frozen=True, slots=True)
class ShortTraceback:
    """The short form of an exception: a traceback with user frames, and one line.

    For a dstrial error without user frames, ``text`` is only the message.
    """

    text: str
    summary: str  # one line: the exception's type and message
    is_whole: bool  # whether ``text`` omits nothing


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    text: str


def short_traceback(error: BaseException, directory: Path | None = None) -> ShortTraceback:
    """Format an exception for the author of the user code.

    Paths are relative to ``directory`` (None: the working directory). A chained exception is shown if it is an explicit cause
    with more information than the last exception, or if it was raised in user code.
    """
    base = f"{(directory or Path.cwd()).resolve()}/"
    described = traceback.TracebackException.from_exception(error, compact=True)
    links = list(_chain(error, described))
    blocks, is_whole = [], len(links) == _chain_length(described)
    for position, (described_one, one, joint) in enumerate(links):
        text, is_all = _block(described_one, one, base)
        is_whole = is_whole and is_all
        blocks.append(text)
        if position < len(links) - 1:
            blocks.append(joint)
    ending = "".join(described.format_exception_only())
    worker = _WORKER_ERROR.match(ending)
    if worker is not None:
        ending = _FRAME.sub("", worker["text"]).partition("\n")[2].lstrip("\n")
    summary = next((line.strip() for line in ending.splitlines() if not line.startswith("  ")), "")
    text = "\n\n".join(blocks)
    is_whole = is_whole and len(text) <= MAX_SHOWN_CHARS
    return ShortTraceback(cut_text(text, MAX_SHOWN_CHARS), cut_text(summary, MAX_LINE_CHARS), is_whole)


def whole_traceback(error: BaseException) -> str:
    """Format an exception and its chain as Python does; truncate at 1 MiB."""
    return cut_text("".join(traceback.format_exception(error)), _MAX_WHOLE_CHARS)


def _chain(
    error: BaseException, described: traceback.TracebackException
) -> Iterable[tuple[traceback.TracebackException, BaseException, str]]:
    """Yield the exceptions of a chain that are shown, the root cause first.

    Each item is (formatted form, exception, Python's phrase before the next exception).
    """
    found: list[tuple[traceback.TracebackException, BaseException, str]] = []
    joint, seen = "", set()
    while id(error) not in seen:
        seen.add(id(error))
        found.append((described, error, joint))
        cause = error.__cause__
        before = cause if cause is not None else None if error.__suppress_context__ else error.__context__
        described_before = described.__cause__ if cause is not None else described.__context__
        if (
            before is None
            or described_before is None
            or not _is_informative(before, error, is_explicit=cause is not None)
        ):
            break
        joint = _BECAUSE if cause is not None else _MEANWHILE
        error, described = before, described_before
    yield from reversed(found)


def _is_informative(before: BaseException, error: BaseException, *, is_explicit: bool) -> bool:
    is_of_user = any(_package(frame.filename) is None for frame in traceback.extract_tb(before.__traceback__))
    if not is_explicit:
        return is_of_user
    message = str(before)
    is_repeated = bool(message) and message in str(error)
    return not is_repeated or (is_of_user and type(before).__name__ not in str(error))


def _chain_length(described: traceback.TracebackException | None) -> int:
    count = 0
    while described is not None:
        count += 1
        described = described.__cause__ or (None if described.__suppress_context__ else described.__context__)
    return count


def _block(described: traceback.TracebackException, error: BaseException, base: str) -> tuple[str, bool]:
    """Return one exception as text, and whether the text shows all frames.

    ``base`` is a directory with a trailing slash; paths in it are shown as relative.
    """
    frames = _frames_of(described.stack)
    ending = "".join(described.format_exception_only()).rstrip("\n")
    if getattr(described, "exceptions", None):
        return "".join(described.format(chain=False)).rstrip("\n"), True
    worker = _WORKER_ERROR.match(ending)
    if worker is None and isinstance(error, DstrialError) and not _of_user(frames):
        return ending.partition(": ")[0].rpartition(".")[2] + ending[ending.find(":") :], not frames
    lines = ["Traceback (most recent call last):"]
    lines += _folded(frames, base, keeps_innermost=worker is None)
    num_shown, num_frames = len(_of_user(frames)), len(frames)
    if worker is not None:
        there = [_Frame(match["file"], match[0].rstrip("\n")) for match in _FRAME.finditer(worker["text"])]
        ending = _FRAME.sub("", worker["text"]).partition("\n")[2].strip("\n")
        lines += [f"  [in {worker['where']}]", *_folded(there, base, keeps_innermost=True)]
        num_shown, num_frames = num_shown + len(_of_user(there)), num_frames + len(there)
    return "\n".join([*lines, ending]), num_shown == num_frames and num_shown <= _MAX_USER_FRAMES


def _frames_of(stack: traceback.StackSummary) -> list[_Frame]:
    return [
        _Frame(frame.filename, "".join(traceback.StackSummary.from_list([frame]).format()).rstrip("\n"))
        for frame in stack
    ]


def _of_user(frames: Sequence[_Frame]) -> list[_Frame]:
    return [frame for frame in frames if _package(frame.file) is None]


def _folded(frames: Sequence[_Frame], base: str, *, keeps_innermost: bool) -> list[str]:
    """Return user frames, at most 16, as text; a line counts consecutive other frames.

    If no frame is the user's, the last two are shown if ``keeps_innermost``; otherwise all are only counted.
    """
    kept = {position for position, frame in enumerate(frames) if _package(frame.file) is None}
    if not kept and keeps_innermost:
        kept = set(range(len(frames))[-_INNERMOST:])
    ordered = sorted(kept)
    if len(ordered) > _MAX_USER_FRAMES:
        half = _MAX_USER_FRAMES // 2
        kept -= set(ordered[half:-half])
    first = min(kept, default=0)
    lines: list[str] = []
    pending: list[_Frame] = []
    for frame, is_kept in [(frames[i], i in kept) for i in range(first, len(frames))]:
        if not is_kept:
            pending.append(frame)
            continue
        lines += _count(pending)
        pending = []
        lines.append(frame.text.replace(f'File "{base}', 'File "'))
    place = _place(pending[-1]) if pending and keeps_innermost else ""
    return [*lines, *_count([*frames[:first], *pending], place)]


def _count(frames: Sequence[_Frame], place: str = "") -> list[str]:
    if not frames:
        return []
    counts = Counter(_package(frame.file) or "your code" for frame in frames)
    word = f"{len(frames)} more frame{'s' if len(frames) > 1 else ''}"
    raised = f"; raised in {place}" if place else ""
    if len(counts) == 1:
        return [f"  [{word} of {next(iter(counts))}{raised}]"]
    return [f"  [{word}: {', '.join(f'{count} of {name}' for name, count in counts.items())}{raised}]"]


def _place(frame: _Frame) -> str:
    installed = _INSTALLED.search(frame.file)
    name = frame.file[installed.start(1) :] if installed is not None else Path(frame.file).name
    found = _LINE.search(frame.text)
    return f"{name}:{found[1]}" if found is not None else name


def _package(file: str) -> str | None:
    """Return the package that a file belongs to; None for user code.

    The result may also be "dstrial", "Python" or "generated code".
    """
    installed = _INSTALLED.search(file)
    if installed is not None:
        return installed[1].removesuffix(".py")
    if file.startswith(f"{_OURS}/"):
        return "dstrial"
    if file.startswith("<") and not file.startswith(("<stdin", "<ipython")):
        return "Python" if file.startswith("<frozen") else "generated code"
    return "Python" if file.startswith(tuple(f"{path}/" for path in _STANDARD_LIBRARY if path)) else None
