"""Runs checks of what users send beside everything else: in threads of their own, with the garbage collector waiting.

A check of the largest legal config makes some hundred thousand objects. Collections among them hold the interpreter for a
tenth of a second each (measured: 156 ms with them, 36 ms without), during which no request is answered; in the threads
that read the database four such checks would hold up every read.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_NUM_THREADS = 2
_MAX_PAUSE_S = 2.0
"""After so long the collector goes on even if one check follows the other."""


class Checker:
    """Threads for checks. Thread-safe."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="dstrial-checker")
        self._lock = threading.Lock()
        self._num_running = 0
        self._paused_s = 0.0

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run a check soon.

        Args:
            function: takes a second or two; what it makes is not collected before it ends.
        """
        return self._executor.submit(self._run, function)

    def close(self) -> None:
        """Wait for the checks that run, and end the threads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _run(self, function: Callable[[], T]) -> T:
        with self._without_collections():
            return function()

    @contextlib.contextmanager
    def _without_collections(self) -> Iterator[None]:
        with self._lock:
            if not self._num_running:
                self._paused_s = time.monotonic()
                gc.disable()
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
                if not self._num_running or time.monotonic() - self._paused_s > _MAX_PAUSE_S:
                    gc.enable()
