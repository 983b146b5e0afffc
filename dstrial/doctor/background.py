"""Run calls that may hang (dead disk, stuck driver) with a deadline."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswerError(Exception):
    """A call did not return before its deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


class Background(Generic[T]):
    """A call in a daemon thread, which does not block the exit of the command."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._began_at_s = time.monotonic()
        self._took_s: float | None = None
        try:
            threading.Thread(target=self._run, args=(call,), name="doctor", daemon=True).start()
        except RuntimeError:
            # At the process limit no thread can start, but the check of that limit must still run.
            self._run(call)

    def result(self, timeout_s: float) -> T:
        """Return the call's result or raise its exception; ``timeout_s`` from the start.

        Raises:
            NoAnswerError: the call has not ended in time.
        """
        try:
            return self._future.result(max(0.0, self._began_at_s + timeout_s - time.monotonic()))
        except concurrent.futures.TimeoutError:
            if self._future.done():  # the call itself raised a TimeoutError
                raise
            raise NoAnswerError(timeout_s) from None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_at_s if self._took_s is None else self._took_s

    def _run(self, call: Callable[[], T]) -> None:
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            self._took_s = time.monotonic() - self._began_at_s
            self._future.set_exception(error)
        else:
            self._took_s = time.monotonic() - self._began_at_s
            self._future.set_result(value)


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return the call's result, or raise ``NoAnswerError`` after ``timeout_s``."""
    return Background(call).result(timeout_s)
