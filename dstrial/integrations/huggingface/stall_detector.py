"""Log which rank waits long for data: a thread looks at what this rank is doing."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("dstrial.integrations.huggingface")

WAIT_S = 30.0
"""How long, in seconds, a rank waits for its next batch before the log says so."""

STOPPING_WAIT_S = 5.0
"""The same where a stop is asked for, which the rank can follow only after its next step."""

_LOOK_S = 1.0


def is_communicating(thread_id: int) -> bool:
    """Whether a thread is in an exchange with other ranks, by its stack; any thread.

    The Trainer counts a batch's tokens over all ranks while it fetches the batch: a rank that has its own data waits there for
    the one that has not.
    """
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("torch.distributed"):
            return True
        frame = frame.f_back
    return False


class StallDetector:
    """Watches a rank's waits for data; training's thread calls ``start`` to ``stop``.

    Args:
        rank: this rank.
        is_stopping: says whether this rank knows of a request to stop; called in the thread, must not communicate.
        clock: seconds that never run backwards.
    """

    def __init__(
        self, rank: int, is_stopping: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._is_stopping = is_stopping
        self._clock = clock
        self._waiting: tuple[float, int] | None = None
        self._said_s = 0.0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched_id = threading.get_ident()

    def start(self) -> None:
        """Begin to watch; a second call does nothing."""
        if self._thread is None:
            self._is_over.clear()
            self._watched_id = threading.get_ident()
            self._thread = threading.Thread(target=self._watch, name="dstrial-data-wait", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._is_over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def begin(self, step: int) -> None:
        """Note that this rank now asks for the batch after ``step``."""
        self._waiting = (self._clock(), step)

    def end(self) -> None:
        """Note that it has come, or that something else is done."""
        self._waiting = None

    def look(self) -> str | None:
        """Return what to say now, or None; a wait is told again once it has doubled."""
        waiting = self._waiting
        if waiting is None:
            self._said_s = 0.0
            return None
        waited_s = self._clock() - waiting[0]
        is_stopping = self._is_stopping()
        limit_s = STOPPING_WAIT_S if is_stopping else WAIT_S
        if waited_s < max(limit_s, 2 * self._said_s) or is_communicating(self._watched_id):
            return None
        self._said_s = waited_s
        then = " A stop is asked for; this rank follows it after its next step." if is_stopping else ""
        return (
            f"rank {self._rank} has waited {waited_s:.0f} s for its next batch after step {waiting[1]}.{then}"
        )

    def _watch(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            text = self.look()
            if text is not None:
                logger.warning("%s", text)
