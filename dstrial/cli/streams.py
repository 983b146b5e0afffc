"""Helpers of commands: streams, tables, progress bars, formats, arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dstrial.visible_text import size_text, visible_line

if TYPE_CHECKING:
    from dstrial.context_directory import Context


class LossTolerantStream:
    """A text stream that discards its output after the first write error.

    A write fails on a closed pipe (``| head``), a lost terminal or a full disk. The descriptor is then redirected to the null
    device, because child processes may also write to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._is_lost = True
            to_null_device(self._stream)
        return len(text)

    def flush(self) -> None:
        """No-op: every write is flushed."""

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def to_null_device(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that Python's flush at exit succeeds."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(descriptor, stream.fileno())
    finally:
        os.close(descriptor)


def count_argument(text: str, *, may_be_zero: bool = True) -> int:
    """Parse an integer of at least 0, or of at least 1 if ``may_be_zero`` is false.

    For use as the ``type`` of an ``argparse`` argument.
    """
    least = 0 if may_be_zero else 1
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; expected an integer of at least {least}")
    return int(text)


def seconds_argument(text: str, *, may_be_zero: bool = False) -> float:
    """Parse a finite number of seconds above 0; if ``may_be_zero``, also 0.

    For use as the ``type`` of an ``argparse`` argument.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
        expected = "of at least 0" if may_be_zero else "above 0"
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; expected a number {expected}")
    return value


def add_state_dir_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="the master's state directory (default: $DSTRIAL_STATE_DIR, or dstrial/ in the user's data directory)",
    )


def add_runs_dir_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs-dir", metavar="DIR", help="directory of all runs (default: $DSTRIAL_RUNS_DIR or runs)"
    )


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Format rows as a table with a header; a cell of None becomes ``-``.

    ``right`` has the indexes of right-aligned columns.
    """
    cells = [
        list(header),
        *([("-" if cell is None else visible_line(str(cell))) for cell in row] for row in rows),
    ]
    widths = [max(len(row[idx]) for row in cells) for idx in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if idx in right else cell.ljust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "".join(f"{line}\n" for line in lines)


def field_lines(fields: Sequence[tuple[str, object]], width: int | None = None) -> str:
    """Format (name, value) pairs as ``name:  value``, one per line; skip None values.

    ``width`` is the column of the values; None chooses the smallest.
    """
    shown = [(name, value) for name, value in fields if value is not None]
    if width is None:
        width = max((len(name) for name, _ in shown), default=0) + 3
    return "".join(f"{name + ':':<{width}}{visible_line(str(value))}\n" for name, value in shown)


def print_json(value: object) -> None:
    """Print a JSON document to standard output; other objects are printed as strings."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


_SMALL_BYTES = 64 << 20  # no bar for smaller totals, which take a moment


@contextlib.contextmanager
def bytes_bar(what: str, num_bytes: int, *, is_plain: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar in bytes; yield a thread-safe function that advances it.

    ``what`` is the bar's label. The bar is hidden with ``is_plain``, without a terminal, and for small totals.
    """
    if is_plain or num_bytes < _SMALL_BYTES or not sys.stderr.isatty():
        yield lambda _num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=5,
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=num_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def context_text(context: Context) -> str:
    """Describe a context directory for users: size, largest entry, excluded entries."""
    name, size = context.largest()
    text = f"{context.num_files} files, {size_text(context.num_bytes)}"
    if size:
        text += f", most of it {name} ({size_text(size)})"
    if context.left_out:
        text += f"; without {', '.join(context.left_out)} (det packs these unless .detignore names them)"
    return text


def command_of(name: str) -> str:
    """Return how to invoke a command installed beside this Python, such as ``det``.

    Returns ``name`` if PATH finds the command, or if there is no such command; otherwise the path of the command's file,
    relative if below the working directory.
    """
    own = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if not own.is_file() or (found is not None and Path(found).resolve() == own.resolve()):
        return name
    below = os.path.relpath(own)
    return str(own) if below.startswith(os.pardir) else below


def det_reaches(address: str) -> bool:
    chosen = os.environ.get("DET_MASTER", os.environ.get("DET_MASTER_ADDR", "localhost:8080"))
    return chosen.removeprefix("http://").rstrip("/") == address.removeprefix("http://")


def det_for(address: str) -> str:
    """Return the ``det`` command that reaches the master at ``address``.

    ``-m ADDRESS`` is added unless ``DET_MASTER`` or the default of ``det`` is this address.
    """
    return command_of("det") if det_reaches(address) else f"{command_of('det')} -m {address}"


def page_of(address: str, experiment_id: int) -> str:
    """Return the URL of an experiment's page, followed by a hint for the login."""
    return f"{address}/det/experiments/{experiment_id} ({command_of('dstrial')} login prints a link that logs in)"
