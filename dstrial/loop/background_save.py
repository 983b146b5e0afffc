"""One save on its way: its thread, its common steps, the reports it waits for.

Determined's client hands metrics to a thread and tells of checkpoints itself. A process that dies between the two would leave
a checkpoint beyond its last report, and after the resume a gap in the metrics that nothing fills. So a checkpoint is told of
only after the metrics that came before it.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from determined import core

from dstrial.errors import CheckpointError
from dstrial.ranks.heartbeat import heartbeat

logger = logging.getLogger("dstrial.loop")

_SAY_WAITING_S = 30.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SaveStatus:
    """How a save stands on one rank; small, because each exchange carries it.

    Attributes:
        is_done: whether it has ended, well or not.
        failure: what made it fail; None if nothing has.
    """

    is_done: bool
    failure: str | None


class SaveJob:
    """A checkpoint whose state is copied and which is now written and registered.

    Args:
        path: its directory.
        uuid: its name in the store.
        batches_trained: finished batches when its state was copied.
        previous_batches: the same of the checkpoint before it; None if there was none.
        complete: does the rest, on all ranks together; raises if there is no checkpoint afterwards.
    """

    def __init__(
        self,
        path: pathlib.Path,
        uuid: str,
        batches_trained: int,
        previous_batches: int | None,
        complete: Callable[[], None],
    ) -> None:
        self.path = path
        self.uuid = uuid
        self.batches_trained = batches_trained
        self.previous_batches = previous_batches
        self.error: BaseException | None = None
        self._complete: Callable[[], None] | None = complete
        self._is_done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Complete it in a thread, which does not keep the process alive: see ``wait``."""
        self._thread = threading.Thread(target=self.run, name="dstrial-save", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Complete it here; a failure is kept in ``error``."""
        complete, self._complete = self._complete, None
        assert complete is not None, "a save runs once"
        beat = heartbeat()
        beat.begin_save(self.batches_trained)
        try:
            complete()
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread: the loop raises it
            self.error = error
        finally:
            del complete
            beat.end_save()
            self._is_done.set()

    def wait(self) -> None:
        """Wait until it has ended; its waits have deadlines. Ranks: each its own."""
        while not self._is_done.wait(_SAY_WAITING_S):
            logger.info("waiting for the checkpoint at batch %d to be written", self.batches_trained)
        if self._thread is not None:
            self._thread.join()

    @property
    def status(self) -> SaveStatus:
        """How it stands on this rank."""
        is_done = self._is_done.is_set()
        if not is_done or self.error is None:
            return SaveStatus(is_done, None)
        return SaveStatus(True, str(self.error) or type(self.error).__name__)


def run_on_all_ranks(
    distributed: core.DistributedContext, step: Callable[[], T], describe: Callable[[Exception], str]
) -> list[T]:
    """Do a step on every rank; the failure of one is the failure of all.

    Args:
        distributed: the ranks.
        step: what this rank does; its result is small and can be pickled.
        describe: makes the message of a failure, which the other ranks raise; it names this rank.

    Returns:
        What the step returned, by rank.

    Raises:
        CheckpointError: the step met an ``OSError`` here, or anything on another rank.
        Exception: what else the step raised here.

    Ranks: all, collectively (one ``allgather``).
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = step()
    except Exception as caught:  # noqa: BLE001  # raised again below, after the other ranks know of it
        error = caught
    message = None if error is None else describe(error)
    outcomes: list[tuple[str | None, T]] = distributed.allgather((message, result))
    if isinstance(error, OSError):
        raise CheckpointError(message) from error
    if error is not None:
        raise error
    for failure, _ in outcomes:
        if failure is not None:
            raise CheckpointError(failure)
    return [outcome for _, outcome in outcomes]


_DEADLINE_S = 600.0
_TICK_S = 0.002


class PendingReports:
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
        """Return how many reports the client was handed. Ranks: the one that reports."""
        # The client never marks a task as done, so that this is how many were ever put in.
        return 0 if self._shipper is None else int(self._shipper._queue.unfinished_tasks) - self._num_before

    def wait(self, deadline_s: float = _DEADLINE_S, *, up_to: int | None = None) -> bool:
        """Wait until the master has taken all reports so far, as the client itself does.

        Args:
            deadline_s: seconds after which a warning is logged and the wait is given up.
            up_to: how many reports to wait for, from ``num_reported``; None for all until now.

        Returns:
            Whether the master has everything.

        Ranks: the one that reports; any thread.
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
