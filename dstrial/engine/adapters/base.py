"""The interface between the training loop and a DeepSpeed engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from deepspeed import comm

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.batch_sizes import dims_of
from dstrial.engine.adapters.validation_plan import ValidationRound, plan_validation
from dstrial.engine.parameter_table import collect_layout
from dstrial.errors import TrialContractError


class EngineAdapter:
    """Adapter of one wrapped data-parallel engine; base class of ``PipelineAdapter``.

    The constructor reads the engine's batch sizes, and makes the engine's batch size setters raise ``TrialContractError``.

    Args:
        engine: the ``deepspeed.DeepSpeedEngine`` that the user's trial has wrapped.
        data_parallel_rank: index of this rank's replica, from 0; None for this rank's index in the engine's data-parallel
            group.
        data_parallel_world_size: number of replicas; None for the size of the engine's data-parallel group.

    Attributes:
        micro_batch_size: records in one forward pass of one replica (``train_micro_batch_size_per_gpu``).
        micro_batches_per_batch: a replica's micro batches per step (``gradient_accumulation_steps``).
        topology: the ``PipelineParallelGrid`` of a pipeline's ranks; None for a data-parallel engine.
        train_calls_per_batch: calls of the trial's ``train_batch`` per optimizer step: 1 for a pipeline, otherwise the
            accumulation steps.
        micro_batches_per_evaluation: micro batches per call of the trial's ``evaluate_batch``: a pipeline's accumulation steps,
            otherwise 1.
        reports_metrics: whether this rank computes the loss: in a pipeline only the last stage, otherwise every rank.
        needs_loader: whether this rank reads records: in a pipeline only the first stage (inputs) and the last stage (labels),
            otherwise every rank.
        sends_ragged_micro_batches: whether a training micro batch may have fewer than ``micro_batch_size`` records. False for a
            pipeline, whose activation buffers have the shape of the first micro batch.
        forward_is_collective: whether every replica must call forward equally often (with ZeRO 3, experts or a pipeline).
    """

    def __init__(
        self, engine: Any, data_parallel_rank: int | None = None, data_parallel_world_size: int | None = None
    ) -> None:
        self.engine = engine
        self.micro_batch_size: int = engine.train_micro_batch_size_per_gpu()
        self.micro_batches_per_batch: int = engine.gradient_accumulation_steps()
        own_rank, own_size = self._replica()
        self.data_parallel_rank = own_rank if data_parallel_rank is None else data_parallel_rank
        self.data_parallel_world_size = (
            own_size if data_parallel_world_size is None else data_parallel_world_size
        )
        self.topology: Any = None
        self.pipeline_stages = 1
        self.train_calls_per_batch = self.micro_batches_per_batch
        self.micro_batches_per_evaluation = 1
        self.reports_metrics = True
        self.needs_loader = True
        self.sends_ragged_micro_batches = True
        self.forward_is_collective: bool = (
            engine.zero_optimization_partition_weights() or engine.has_moe_layers
        )
        for setter in ("set_train_batch_size", "set_train_micro_batch_size"):
            setattr(engine, setter, functools.partial(_refuse_batch_size, setter))

    def _replica(self) -> tuple[int, int]:
        """Return (0-based index of this rank's replica, number of replicas)."""
        dims, group = dims_of(self.engine), self.engine.data_parallel_group
        # A model-parallel unit with only sequence parallelism has no data-parallel group; consecutive ranks share a sequence.
        rank = comm.get_rank() // dims.sp if group is None else comm.get_rank(group=group)
        return int(rank), dims.dp

    @property
    def micro_batches_stepped(self) -> int:
        """Number of micro batches that this replica has trained, also before a resume."""
        return int(
            self.engine.micro_steps
        )  # DeepSpeed counts calls of ``step`` (0.19.8 runtime/engine.py:3680)

    def set_training(self, training: bool) -> None:
        self.engine.train(training)

    def bind_training_iterator(self, iterator: Iterator[Any] | None) -> None:
        """Make a pipeline's ``engine.train_batch()`` read ``iterator``.

        A no-op for a data-parallel engine. The iterator yields micro batches endlessly. On ranks that read no records,
        ``iterator`` is None.
        """

    def validation_rounds(
        self, num_records: int, records_per_micro_batch: int, *, all_replicas: bool = False
    ) -> tuple[ValidationRound, ...]:
        """Return this replica's validation rounds, in order.

        All replicas together count each record once. In each round, the training loop calls the trial's ``evaluate_batch``
        once; a round without micro batches is skipped.

        Args:
            num_records: size of the validation set.
            records_per_micro_batch: batch size of the validation loader.
            all_replicas: True makes every replica call ``evaluate_batch`` equally often. Required if another engine of the
                trial has ``forward_is_collective``.
        """
        return plan_validation(
            num_records,
            records_per_micro_batch,
            self.micro_batches_per_evaluation,
            self.data_parallel_rank,
            self.data_parallel_world_size,
            forward_is_collective=self.forward_is_collective or all_replicas,
        )

    def bind_validation_round(
        self, validation_round: ValidationRound | None, iterator: Iterator[Any] | None
    ) -> None:
        """Make a pipeline's ``engine.eval_batch`` evaluate a validation round.

        A no-op for a data-parallel engine. ``validation_round`` None ends the validation. ``iterator`` yields the round's micro
        batches; it is None on ranks that read no records. An iterator passed to ``eval_batch`` takes precedence.
        """

    def layout(self, allgather: Callable[[Any], list[Any]]) -> Layout:
        """Return how the engine's state is split over ranks.

        ``allgather(value)`` returns the values of all ranks, in order of ranks.

        Ranks: all, collectively.
        """
        return collect_layout(self.engine, allgather)


def _refuse_batch_size(setter: str, *_args: Any, **_kwargs: Any) -> NoReturn:
    raise TrialContractError(
        f"{setter} is called on a wrapped engine; expected the batch sizes that it was wrapped with, in which batches, "
        "records and the order of data are counted. Set them in the DeepSpeed config. For another batch later, begin a new "
        "run from a checkpoint's weights (searcher.source_checkpoint_uuid)."
    )
