"""Python's cyclic garbage collector, kept from looking through what was imported.

Importing torch makes a million objects that live as long as the process. The collector goes through all of them again and again
while they are made, and several times when the process ends.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Pause garbage collection in a block, if it is on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def paused_for_good() -> Iterator[None]:
    """As ``paused``, and never look at what is there at the end of the block.

    For imports before any code of a user: objects of theirs are to be found and collected as ever.
    """
    with paused():
        try:
            yield
        finally:
            gc.freeze()
