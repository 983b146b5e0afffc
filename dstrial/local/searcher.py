"""Determined's deprecated searcher interface, for Core API scripts that still ask it how long to train."""

from __future__ import annotations

from collections.abc import Iterator

from determined import core

from dstrial.errors import RankError
from dstrial.local.train_context import LocalTrainContext


class LocalSearcherOperation(core.SearcherOperation):  # type: ignore[misc]  # mypy does not follow determined
    """The one operation of a run off any cluster: train to the configured length.

    Args:
        length: what to train to, in the unit of ``searcher.max_length``.
        is_chief: whether this process is rank 0.
        train: where progress is kept.
    """

    def __init__(self, length: int, is_chief: bool, train: LocalTrainContext) -> None:
        self._length = length
        self._is_chief = is_chief
        self._train = train
        self._completed = False

    def report_progress(self, length: float) -> None:
        """Keep how much of ``length`` is trained.

        Raises:
            RankError: called on a worker, or for another length after ``report_completed``.

        Ranks: 0.
        """
        if not self._is_chief:
            raise RankError(
                "op.report_progress() is called on a worker; expected rank 0. Call it only where "
                "distributed.rank is 0."
            )
        if self._completed and length != self._length:
            raise RankError(
                "op.report_progress() is called after op.report_completed(); expected no more progress. "
                "Report progress before completion."
            )
        self._train.report_progress(min(1.0, max(0.0, length / self._length)))


class LocalSearcherContext(core.SearcherContext):  # type: ignore[misc]  # mypy does not follow determined
    """Yield one operation of the configured length, with Determined's synchronisation.

    Args:
        dist: the ranks of the job.
        train: where progress is kept.
        max_length: ``searcher.max_length``, at least 1.
        unit: the unit of ``max_length``; None if it was given as a bare number.
    """

    def __init__(
        self,
        dist: core.DistributedContext,
        train: LocalTrainContext,
        max_length: int,
        unit: core.Unit | None = None,
    ) -> None:
        self._dist = dist
        self._train = train
        self._length = max_length
        self._units = unit

    def _operations(
        self, searcher_mode: core.SearcherMode = core.SearcherMode.WorkersAskChief
    ) -> Iterator[core.SearcherOperation]:
        asks_chief = core.SearcherMode(searcher_mode) is core.SearcherMode.WorkersAskChief
        if self._dist.rank != 0:
            if not asks_chief:
                raise RankError(
                    f"searcher.operations(ChiefOnly) is called on rank {self._dist.rank}; expected rank 0. "
                    "Use SearcherMode.WorkersAskChief, or call it on the chief only."
                )
            while (length := self._dist.broadcast(None)) is not None:
                yield LocalSearcherOperation(length, False, self._train)
            return
        operation = LocalSearcherOperation(self._length, True, self._train)
        if asks_chief:
            self._dist.broadcast(operation.length)
        yield operation
        if not operation._completed:
            raise RankError(
                "a searcher operation was left without op.report_completed(); expected one call for each "
                "operation. Call it with the searcher metric after the last validation."
            )
        if asks_chief:
            self._dist.broadcast(None)
