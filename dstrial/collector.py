"""Keep Python's cyclic garbage collector from traversing imported modules.

Importing torch creates a million long-lived objects; the collector would traverse them repeatedly, also at interpreter exit.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Disable cyclic garbage collection in the block; restore its state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def paused_for_good() -> Iterator[None]:
    """Disable garbage collection in the block; then exempt all existing objects.

    The exemption (``gc.freeze``) is permanent. Use this only for imports before user code runs, so that user objects are still
    collected.
    """
    with paused():
        try:
            yield
        finally:
            gc.freeze()
