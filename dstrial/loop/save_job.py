"""One save on its way: the thread that completes it, how it stands, and steps that all ranks do or fail together."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
import threading
from collections.abc import Callable
from typing import TypeVar

from determined import core

from dstrial.errors import CheckpointError

logger = logging.getLogger("dstrial.loop")

_SAY_WAITING_S = 30.0

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class SaveStatus:
    """How a save stands on one rank; small, because it travels with every exchange while one is under way.

    Attributes:
        is_done: whether it has ended, well or not.
        failure: what made it fail; None if nothing has.
    """

    is_done: bool
    failure: str | None


class SaveJob:
    """A checkpoint whose state is copied and which is now written, registered and so completed.

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
        """Complete it in a thread, which does not keep the process from ending: see ``wait``."""
        self._thread = threading.Thread(target=self.run, name="dstrial-save", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Complete it here; a failure is kept in ``error``."""
        complete, self._complete = self._complete, None
        assert complete is not None, "a save runs once"
        try:
            complete()
        except BaseException as error:  # noqa: BLE001  # the boundary of a thread: the loop raises it
            self.error = error
        finally:
            del complete
            self._is_done.set()

    def wait(self) -> None:
        """Wait until it has ended. Its own waits for other ranks have deadlines. Ranks: each its own."""
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


def together(
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
