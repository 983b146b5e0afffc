"""Record stop signals in a flag that the training loop polls, or in a list."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

LAUNCHED_VARIABLE = "DSTRIAL_LAUNCHED"
"""Environment variable: 1 if dstrial's launcher has started this rank."""
LAUNCHER_PID_VARIABLE = "DSTRIAL_LAUNCHER_PID"
"""Environment variable with the launcher's process id; a rank ends when that process has ended."""


class StopSignals:
    """Context manager in which SIGTERM and Ctrl-C set a flag (:attr:`requested`).

    A rank of ``dstrial.launch`` ignores SIGINT: the launcher forwards Ctrl-C as SIGTERM. Without the launcher the first SIGINT
    sets the flag and the second SIGINT raises KeyboardInterrupt. The block's end restores the previous handlers. Outside the
    main thread Python allows no handlers, and the flag stays unset.

    Processes forked in the block (data loader workers) exit on SIGTERM but ignore SIGINT, because the rank needs them for its
    last batches. The flag may differ between ranks until the loop synchronises it.

    Args:
        is_deferred: if True, entering the block installs no handlers; call ``listen`` to install them.
    """

    def __init__(self, *, is_deferred: bool = False) -> None:
        self._is_deferred = is_deferred
        self._requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._owner_pid = os.getpid()

    @property
    def requested(self) -> str | None:
        """The name of the first stop signal, such as ``SIGTERM``; None if there was none."""
        return self._requested

    def __enter__(self) -> StopSignals:
        if not self._is_deferred:
            self.listen()
        return self

    def listen(self) -> None:
        """Install the signal handlers.

        A no-op if the handlers are installed, or outside the main thread.
        """
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
    """Yield a list of the signals SIGINT, SIGTERM, SIGHUP and ``more`` that arrive.

    Such a signal is appended to the list and has no other effect; the caller polls the list. The block's end restores the
    previous handlers. For commands that start or follow processes; ranks use :class:`StopSignals`.
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
