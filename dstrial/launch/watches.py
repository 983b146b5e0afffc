"""A polling thread and a status file, used by ``start_watch`` and ``stalls``."""

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
def polling(
    poll: Callable[[], None], close: Callable[[], None], *, name: str, every_s: float
) -> Iterator[None]:
    """Call ``poll`` periodically from a thread until the block ends, then ``close``.

    If ``poll`` raises, the exception is logged (a repeated exception only once), and polling continues.
    """
    is_over = threading.Event()

    def run() -> None:
        last = ""
        while not is_over.wait(every_s):
            try:
                poll()
                last = ""
            except Exception as error:
                if repr(error) != last:
                    logger.warning("%s failed once; it continues", name, exc_info=True)
                last = repr(error)
        close()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class StatusFile:
    """A JSON status file in the allocation's directory.

    Without a master there is no such directory, and ``write`` is a no-op.
    """

    def __init__(self, name: str) -> None:
        directory = os.environ.get(ALLOCATION_DIR_VARIABLE)
        self._path = Path(directory) / name if directory else None
        self._content: dict[str, Any] | None = None

    def write(self, fields: Mapping[str, Any] | None) -> None:
        """Replace the file's content; None deletes the file."""
        content = None if fields is None else dict(fields)
        if self._path is None or content == self._content:
            return
        with contextlib.suppress(OSError):  # The next poll writes the file.
            if content is None:
                self._path.unlink(missing_ok=True)
            else:
                replace_file(self._path, json.dumps(content), sync=False)
            self._content = content
