"""What the training loop needs of a DeepSpeed engine, and nothing else.

The loop never asks which kind of engine it has. Whatever differs between a data-parallel engine and
a pipeline engine is answered by an adapter, one per wrapped engine.
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
    """What the loop asks of one wrapped DeepSpeed engine.

    All properties are constant after construction and need no communication.
    """

    @property
    def engine(self) -> Any:
        """The wrapped ``deepspeed.DeepSpeedEngine`` itself, the object the user holds."""

    @property
    def topology(self) -> Any:
        """The ``PipelineParallelGrid`` of a pipeline's ranks; None for data parallel."""

    @property
    def pipeline_stages(self) -> int:
        """Stages of a pipeline; 1 for data parallel."""

    @property
    def train_calls_per_batch(self) -> int:
        """How often the loop calls ``train_batch`` for one optimizer step.

        ``gradient_accumulation_steps`` for data parallel; 1 for a pipeline.
        """

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
        """Which replica this rank belongs to, from 0."""

    @property
    def data_parallel_world_size(self) -> int:
        """Number of replicas."""

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

    def set_training(self, training: bool) -> None:
        """Put the module into training or evaluation mode. Ranks: any; no communication."""

    def bind_training_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Make ``engine.train_batch()`` without arguments draw from ``iterator``.

        A data-parallel engine has no ``train_batch``; there it does nothing.

        Args:
            iterator: yields micro batches without end; None on ranks that read no records.
        """

    @property
    def micro_batches_per_evaluation(self) -> int:
        """Micro batches per ``evaluate_batch``: 1, or a pipeline's accumulation."""

    def validation_rounds(
        self, num_records: int, records_per_micro_batch: int, *, all_replicas: bool = False
    ) -> tuple[ValidationRound, ...]:
        """Plan a validation: every record once, equally many rounds on every replica.

        Args:
            num_records: records in the validation set, the same on all ranks.
            records_per_micro_batch: batch size of the validation loader.
            all_replicas: every replica must call ``evaluate_batch`` equally often, because a forward pass of
                another engine of the trial is collective.

        Returns:
            One entry per call of ``evaluate_batch``, in order, for this replica.
        """

    def bind_validation_round(
        self, validation_round: ValidationRound | None, iterator: Iterator[Any] | None
    ) -> None:
        """Make ``engine.eval_batch`` serve one round, with or without its iterator.

        Args:
            validation_round: the round that the next ``eval_batch`` call evaluates; None ends validation.
            iterator: yields this round's micro batches; None on ranks that read no records. An
                iterator that the caller of ``eval_batch`` passes takes its place.
        """

    def layout(self, allgather: Callable[[Any], list[Any]]) -> Layout:
        """Describe for the manifest how the engine's state is laid out over ranks.

        Args:
            allgather: hands a picklable object to all ranks; returns those of all ranks, in rank order.

        Returns:
            The same layout on every rank.

        Ranks: all, collectively (one ``allgather``).
        """


class WrappedEngine:
    """What adapters of every kind answer alike.

    The batch sizes are read once: the engine's own setters refuse to change them from then on.

    Attributes:
        engine: the wrapped engine.
        micro_batch_size: records in one forward pass of one replica.
        micro_batches_per_batch: micro batches of one replica in one optimizer step.
        data_parallel_rank: replica of this rank, from 0.
        data_parallel_world_size: number of replicas.
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
        """Put the module into training or evaluation mode. Ranks: any; no communication."""
        self.engine.train(training)


def _refuse_batch_size(setter: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise TrialContractError(
        f"{setter} is called on a wrapped engine; expected the batch sizes that it was wrapped with, in which batches, "
        "records and the order of data are counted. Set them in the DeepSpeed config. For another batch later, begin a new "
        "run from a checkpoint's weights (searcher.source_checkpoint_uuid)."
    )
