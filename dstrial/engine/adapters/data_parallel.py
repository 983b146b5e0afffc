"""The adapter of data-parallel engines: users call forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed import DeepSpeedEngine, comm

from dstrial.checkpoint.layout import Layout
from dstrial.engine.adapters.base import WrappedEngine
from dstrial.engine.adapters.validation_plan import ValidationRound, plan_data_parallel
from dstrial.engine.parameter_table import collect_layout


class DataParallelAdapter(WrappedEngine):
    """Adapter of a ``DeepSpeedEngine``; rank and size default to those of its groups."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        data_parallel_rank: int | None = None,
        data_parallel_world_size: int | None = None,
    ) -> None:
        super().__init__(
            engine,
            comm.get_rank(group=engine.data_parallel_group)
            if data_parallel_rank is None
            else data_parallel_rank,
            engine.dp_world_size if data_parallel_world_size is None else data_parallel_world_size,
        )
        self._forward_is_collective: bool = (
            engine.zero_optimization_partition_weights() or engine.has_moe_layers
        )

    @property
    def topology(self) -> None: ...

    @property
    def pipeline_stages(self) -> int:
        return 1

    @property
    def train_calls_per_batch(self) -> int:
        return self.micro_batches_per_batch

    @property
    def micro_batches_stepped(self) -> int:
        """Number of ``step`` calls, counted by DeepSpeed (0.19.8 runtime/engine.py:3680)."""
        return int(self.engine.micro_steps)

    @property
    def reports_metrics(self) -> bool:
        return True

    @property
    def needs_loader(self) -> bool:
        return True

    @property
    def sends_ragged_micro_batches(self) -> bool:
        return True

    @property
    def forward_is_collective(self) -> bool:
        """Whether forward communicates, as with ZeRO 3 and experts."""
        return self._forward_is_collective

    def bind_training_iterator(self, iterator: Iterator[Any] | None) -> None: ...

    @property
    def micro_batches_per_evaluation(self) -> int:
        return 1

    def validation_rounds(
        self, num_records: int, records_per_micro_batch: int, *, all_replicas: bool = False
    ) -> tuple[ValidationRound, ...]:
        return plan_data_parallel(
            num_records,
            records_per_micro_batch,
            self.data_parallel_rank,
            self.data_parallel_world_size,
            forward_is_collective=self._forward_is_collective or all_replicas,
        )

    def bind_validation_round(
        self, validation_round: ValidationRound | None, iterator: Iterator[Any] | None
    ) -> None: ...

    def layout(self, allgather: Callable[[Any], list[Any]]) -> Layout:
        return collect_layout(self.engine, allgather)
