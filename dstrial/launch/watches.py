"""What the launcher's watches share.

A thread that looks again and again, and a file that shows what it sees.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrial.file_writes import replace_file
from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE

logger = logging.getLogger("dstrial.launch")


@contextlib.contextmanager
def watching(
    look: Callable[[], None], close: Callable[[], None], *, name: str, every_s: float
) -> Iterator[None]:
    """Call ``look`` from a thread while a block lasts, then ``close``.

    A look that fails is logged, once in a row of equal ones, and watching goes on.
    """
    is_over = threading.Event()

    def run() -> None:
        last = ""
        while not is_over.wait(every_s):
            try:
                look()
                last = ""
            except Exception as error:
                if repr(error) != last:
                    logger.warning("%s had a problem and goes on", name, exc_info=True)
                last = repr(error)
        close()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class ShownFile:
    """A file of the allocation's directory that shows what a watch sees."""

    def __init__(self, name: str) -> None:
        directory = os.environ.get(ALLOCATION_DIR_VARIABLE)
        self._path = Path(directory) / name if directory else None

    def show(self, fields: Mapping[str, Any] | None) -> None:
        """Replace what is shown; None takes it back."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # The next look shows it.
            if fields is None:
                self._path.unlink(missing_ok=True)
            else:
                replace_file(self._path, json.dumps(dict(fields)), sync=False)
