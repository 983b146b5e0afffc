"""The interface between the training loop and a DeepSpeed engine.

The loop does not distinguish kinds of engines: each wrapped engine has an adapter for its kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from dstrial.errors import TrialContractError

if TYPE_CHECKING:
    from dstrial.checkpoint.layout import Layout
    from dstrial.engine.adapters.validation_plan import ValidationRound


class EngineAdapter(Protocol):
    """Adapter of one wrapped engine; its properties never change."""

    @property
    def engine(self) -> Any:
        """The wrapped ``deepspeed.DeepSpeedEngine``, the object the user holds."""

    @property
    def topology(self) -> Any:
        """The ``PipelineParallelGrid`` of a pipeline's ranks; None for data parallel."""

    @property
    def pipeline_stages(self) -> int:
        """Stages of a pipeline; 1 for data parallel."""

    @property
    def train_calls_per_batch(self) -> int:
        """Calls of ``train_batch`` per step: accumulation steps, or 1 for a pipeline."""

    @property
    def micro_batch_size(self) -> int:
        """Records in one forward pass of one replica (``train_micro_batch_size_per_gpu``)."""

    @property
    def micro_batches_per_batch(self) -> int:
        """A replica's micro batches per step (``gradient_accumulation_steps``)."""

    @property
    def micro_batches_stepped(self) -> int:
        """Micro batches stepped (``step``, ``train_batch``) since the engine was made."""

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank's replica, from 0."""

    @property
    def data_parallel_world_size(self) -> int: ...

    @property
    def reports_metrics(self) -> bool:
        """Whether this rank holds the loss: every rank, or a pipeline's last stage."""

    @property
    def needs_loader(self) -> bool:
        """Whether this rank reads records: all ranks, or a pipeline's two end stages."""

    @property
    def sends_ragged_micro_batches(self) -> bool:
        """Whether a training micro batch may hold fewer records than ``micro_batch_size``.

        False for a pipeline: its activation buffers are allocated once, for the first shape it sees.
        """

    @property
    def forward_is_collective(self) -> bool:
        """Whether every replica must call forward equally often (ZeRO 3, pipelines)."""

    def set_training(self, training: bool) -> None: ...

    def bind_training_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Make ``train_batch()`` read from ``iterator``; a no-op for data parallel.

        The iterator yields micro batches endlessly; it is None on ranks that read no records.
        """

    @property
    def micro_batches_per_evaluation(self) -> int:
        """Micro batches per ``evaluate_batch``: 1, or a pipeline's accumulation steps."""

    def validation_rounds(
        self, num_records: int, records_per_micro_batch: int, *, all_replicas: bool = False
    ) -> tuple[ValidationRound, ...]:
        """Plan a validation: each record once, the same number of rounds on all replicas.

        ``all_replicas``: every replica must call ``evaluate_batch`` equally often, because a forward pass of another engine
        of the trial is collective. Returns one round per call of ``evaluate_batch`` on this replica, in order.
        """

    def bind_validation_round(
        self, validation_round: ValidationRound | None, iterator: Iterator[Any] | None
    ) -> None:
        """Make ``engine.eval_batch`` evaluate one round; None ends the validation.

        The iterator yields this round's micro batches; it is None on ranks that read no records. An iterator passed to
        ``eval_batch`` overrides it.
        """

    def layout(self, allgather: Callable[[Any], list[Any]]) -> Layout:
        """Return how the engine's state is split over ranks. Ranks: all, collectively."""


class WrappedEngine:
    """Base of the adapters: properties common to all kinds of engines.

    The batch sizes are read once; afterwards the engine's setters raise an error.
    """

    def __init__(self, engine: Any, data_parallel_rank: int, data_parallel_world_size: int) -> None:
        self.engine = engine
        self.micro_batch_size: int = engine.train_micro_batch_size_per_gpu()
        self.micro_batches_per_batch: int = engine.gradient_accumulation_steps()
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_world_size = data_parallel_world_size
        for setter in ("set_train_batch_size", "set_train_micro_batch_size"):
            setattr(engine, setter, functools.partial(_refuse_batch_size, setter))

    def set_training(self, training: bool) -> None:
        self.engine.train(training)


def _refuse_batch_size(setter: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise TrialContractError(
        f"{setter} is called on a wrapped engine; expected the batch sizes that it was wrapped with, in which batches, "
        "records and the order of data are counted. Set them in the DeepSpeed config. For another batch later, begin a new "
        "run from a checkpoint's weights (searcher.source_checkpoint_uuid)."
    )
