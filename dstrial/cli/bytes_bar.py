"""A progress bar over bytes on a terminal, and sizes as people read them."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_SMALL_BYTES = 64 << 20


class BytesBar:
    """Shows on the standard error how many bytes of a known total are done; nothing where nobody would see it.

    Args:
        what: is being done, ``verifying`` for example.
        num_bytes: the total; a bar is not worth its flicker for little.
        is_plain: whether the user wants no bar.
    """

    def __init__(self, what: str, num_bytes: int, *, is_plain: bool = False) -> None:
        self._progress: Progress | None = None
        if not is_plain and num_bytes >= _SMALL_BYTES and sys.stderr.isatty():
            self._progress = _progress()
            self._task = self._progress.add_task(what, total=num_bytes)

    def __enter__(self) -> BytesBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, num_bytes: int) -> None:
        """Move the bar; from any thread."""
        if self._progress is not None:
            self._progress.advance(self._task, num_bytes)


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=5,
        transient=True,
    )


def size_text(num_bytes: int) -> str:
    """Write a size with three significant digits, for example ``1.25 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
