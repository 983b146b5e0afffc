"""Reports on their way to the master: a checkpoint is told of only after the metrics that came before it.

Determined's client hands metrics to a thread and tells of checkpoints itself. A process that dies between the two would leave
a checkpoint beyond its last report, and after the resume a gap in the metrics that nothing fills.
"""

from __future__ import annotations

import logging
import time
from typing import Any

logger = logging.getLogger("dstrial.loop")

_DEADLINE_S = 600.0
_TICK_S = 0.002


class ReportsUnderway:
    """The metric reports that the master has not taken yet.

    Args:
        train: Determined's train context, or one that has its ``_metrics``; off a cluster there is nothing to wait for.

    Source: ``determined/core/_metrics.py`` of determined 0.38.1: a queue, and a thread that posts one report at a time.
    """

    def __init__(self, train: Any) -> None:
        shipper: Any = getattr(getattr(train, "_metrics", None), "_shipper", None)
        is_known = hasattr(shipper, "_queue") and hasattr(shipper, "_post_metrics")
        self._shipper: Any = shipper if is_known else None
        self._num_posted = 0
        if is_known:
            post = shipper._post_metrics
            # What is still in the queue will be counted.
            self._num_before = shipper._queue.unfinished_tasks - shipper._queue.qsize()

            def post_and_count(*args: Any, **kwargs: Any) -> None:
                post(*args, **kwargs)
                self._num_posted += 1

            shipper._post_metrics = post_and_count

    def num_reported(self) -> int:
        """Return how many reports were handed to the client until now. Ranks: the one that reports."""
        # The client never marks a task as done, so that this is how many were ever put in.
        return 0 if self._shipper is None else int(self._shipper._queue.unfinished_tasks) - self._num_before

    def wait(self, deadline_s: float = _DEADLINE_S, *, up_to: int | None = None) -> bool:
        """Wait until the master has taken what was reported until now. Ranks: the one that reports; any thread.

        A master that is away is waited for, as the client itself does.

        Args:
            deadline_s: seconds after which a warning is logged and the wait is given up.
            up_to: how many reports to wait for, from ``num_reported``; None for all until now.

        Returns:
            Whether the master has everything.
        """
        shipper = self._shipper
        if shipper is None:
            return True
        wanted = self.num_reported() if up_to is None else up_to
        give_up_at_s = time.monotonic() + deadline_s
        while self._num_posted < wanted:
            if not shipper.is_alive():
                return False  # the next report raises what ended it
            if time.monotonic() > give_up_at_s:
                missing = wanted - self._num_posted
                logger.warning(
                    "the master has not taken %d metric reports within %.0f s", missing, deadline_s
                )
                return False
            time.sleep(_TICK_S)
        return True
