"""Requests to stop: signals become a flag that the loop polls, or a list."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

LAUNCHED_VARIABLE = "DSTRIAL_LAUNCHED"
LAUNCHER_PID_VARIABLE = "DSTRIAL_LAUNCHER_PID"


class StopSignals:
    """Context manager that turns SIGTERM and Ctrl-C into a flag while it is open.

    A rank of ``dstrial.launch`` ignores SIGINT: its launcher passes Ctrl-C on as SIGTERM. Without that launcher the first SIGINT
    sets the flag and the second one raises KeyboardInterrupt. The previous handlers are back when the block ends. Outside the
    main thread Python allows no handlers, and the flag stays unset.

    Processes forked meanwhile (workers of a data loader) die of SIGTERM and ignore SIGINT, as the rank needs them for its last
    batches. The flags of two ranks may differ until they agree on one.

    Args:
        is_deferred: whether handlers are installed only by ``listen``. Before that a signal ends the process.
    """

    def __init__(self, *, is_deferred: bool = False) -> None:
        self._is_deferred = is_deferred
        self._requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._owner_pid = os.getpid()

    @property
    def requested(self) -> str | None:
        """The first signal that asked for a stop, such as ``SIGTERM``; None if none did."""
        return self._requested

    def __enter__(self) -> StopSignals:
        if not self._is_deferred:
            self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers; a no-op the second time."""
        if threading.current_thread() is threading.main_thread() and not self._previous:
            self._owner_pid = os.getpid()
            for signal_ in (signal.SIGTERM, signal.SIGINT):
                self._previous[signal_] = signal.signal(signal_, self._on_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signal_, handler in self._previous.items():
            signal.signal(signal_, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _on_signal(self, signal_number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._owner_pid:
            if signal_number == signal.SIGTERM:
                signal.signal(signal_number, signal.SIG_DFL)
                os.kill(os.getpid(), signal_number)
            return
        if signal_number == signal.SIGINT:
            if os.environ.get(LAUNCHED_VARIABLE) == "1":
                return
            if self._requested is not None:
                raise KeyboardInterrupt
        if self._requested is None:
            self._requested = signal.Signals(signal_number).name


@contextlib.contextmanager
def noted_signals(*more: signal.Signals) -> Iterator[list[signal.Signals]]:
    """Note SIGINT, SIGTERM, SIGHUP and ``more`` in a list; none ends the block.

    For a command that starts or follows processes and decides itself what a request to stop means; ranks take
    :class:`StopSignals`.
    """
    noted: list[signal.Signals] = []

    def note(number: int, _frame: object) -> None:
        noted.append(signal.Signals(number))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
