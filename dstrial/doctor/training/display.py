"""Show a run of training checks: a line per beginning and end, on a terminal a moving one in between."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.status import Status as Spinner

from dstrial.doctor.training.check import Check, Result
from dstrial.doctor.training.runner import Told


@contextlib.contextmanager
def shown(stream: TextIO | None = None) -> Iterator[Told]:
    """Yield what shows a run on a stream, stderr if None."""
    console = Console(file=stream or sys.stderr, highlight=False, markup=False, soft_wrap=True)
    spinner: Spinner | None = Spinner("", console=console) if console.is_terminal else None
    began_s, text = 0.0, ""

    def begins(idx: int, count: int, check: Check, allowed_s: float) -> None:
        nonlocal began_s, text
        began_s = time.monotonic()
        text = f"[{idx + 1}/{count}] {check.name}: {check.title}"
        if spinner is None:
            console.print(f"{text} (at most {allowed_s:.0f} s)")
        else:
            spinner.update(text)
            spinner.start()

    def goes_on() -> None:
        if spinner is not None:
            spinner.update(f"{text} {time.monotonic() - began_s:.0f} s")

    def ends(idx: int, count: int, result: Result) -> None:
        if spinner is not None:
            spinner.stop()
        console.print(
            f"[{idx + 1}/{count}] {result.name}: {result.status.value}, {result.seconds:.1f} s: {result.summary}"
        )
        if result.not_shown:
            console.print(f"      not shown here: {result.not_shown}")
        if result.advice:
            console.print(f"      {result.advice}")

    try:
        yield Told(begins, goes_on, ends)
    finally:
        if spinner is not None:
            spinner.stop()
