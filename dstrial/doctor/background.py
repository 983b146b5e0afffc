"""Calls that may never return, in threads that nobody has to wait for.

A statistic of a network disk that is gone, a name that no server resolves, a driver that is stuck: each of them blocks its
caller in the kernel, where nothing can end it. A thread that is a daemon does not keep the command from ending.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class NoAnswerError(Exception):
    """A call has not returned before its deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


class Background(Generic[T]):
    """One call in a thread of its own, begun at once."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._began_at_s = time.monotonic()
        self._took_s: float | None = None
        try:
            threading.Thread(target=self._run, args=(call,), name="doctor", daemon=True).start()
        except RuntimeError:
            # At the limit of processes no thread can be begun; what finds that limit must not fail at it.
            self._run(call)

    def result(self, timeout_s: float) -> T:
        """Return or raise what the call returned or raised; any number of threads may ask.

        Args:
            timeout_s: how long the call may take, counted from its beginning.

        Raises:
            NoAnswerError: it has not ended by then.
        """
        try:
            return self._future.result(max(0.0, self._began_at_s + timeout_s - time.monotonic()))
        except concurrent.futures.TimeoutError:
            if self._future.done():  # the call itself raised a TimeoutError
                raise
            raise NoAnswerError(timeout_s) from None

    @property
    def seconds(self) -> float:
        """How long the call took, or has taken so far."""
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
    """Return a call's result if it comes in time; arguments, errors as ``Background``."""
    return Background(call).result(timeout_s)
