"""The adapter for pipeline engines; replaces ``train_batch`` and ``eval_batch``.

DeepSpeed fixes activation shapes at the first micro batch, requires an iterator in every call, and averages the replicas'
validation losses without weights. The replacements reset the shapes between training and validation, use the loop's iterator
by default, and weight the losses by records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from deepspeed import PipelineEngine, comm

from dstrial.engine.adapters.base import EngineAdapter
from dstrial.engine.adapters.validation_plan import ValidationRound
from dstrial.engine.deepspeed_internals import engines
from dstrial.engine.random_state import RngState
from dstrial.engine.state import bind_load_checkpoint, describe_rank
from dstrial.errors import DataError, TrialContractError

# Shapes that a pipeline's activation buffers may have: those of training, or of whole micro batches of a validation.
_TRAINING_SHAPE = "training"
_VALIDATION_SHAPE = "validation"


class PipelineAdapter(EngineAdapter):
    """Adapter that replaces a ``PipelineEngine``'s ``train_batch`` and ``eval_batch``."""

    def __init__(
        self,
        engine: PipelineEngine,
        data_parallel_rank: int | None = None,
        data_parallel_world_size: int | None = None,
    ) -> None:
        super().__init__(engine, data_parallel_rank, data_parallel_world_size)
        if shared := engines.layers_sharing_across_stages(engine.module):
            one, other = shared
            raise TrialContractError(
                f"layers {one} and {other} of the PipelineModule share a parameter and lie on stages {shared[one]} and "
                f"{shared[other]}, each of which would train a copy of its own; expected a TiedLayerSpec for both. Write "
                "TiedLayerSpec('shared', LayerClass, ...) in place of the two modules."
            )
        self.topology = engine.mpu
        self.pipeline_stages = int(engine.grid.get_pipe_parallel_world_size())
        # One call of train_batch or eval_batch runs the schedule over all micro batches of a batch.
        self.train_calls_per_batch = 1
        self.micro_batches_per_evaluation = self.micro_batches_per_batch
        self.reports_metrics = engine.is_last_stage()
        self.needs_loader = engine.is_first_stage() or engine.is_last_stage()
        self.sends_ragged_micro_batches = False
        self.forward_is_collective = True  # stages exchange activations, and evaluations begin with a barrier
        self._training_iterator: Iterator[Any] | None = None
        self._round: ValidationRound | None = None
        self._round_iterator: Iterator[Any] | None = None
        self._shape: str | None = _TRAINING_SHAPE  # shape of the activation buffers; equal on all ranks
        self._weights: tuple[int, ...] | None = None  # in a round: real records of each micro batch
        self._input_shapes: list[tuple[int, ...]] | None = None  # of the first micro batch in the buffers
        engine.train_batch = self.train_batch
        engine.eval_batch = self.eval_batch
        engines.bind_output_reduction(engine, self.reduce_outputs)
        bind_load_checkpoint(engine)

    def _replica(self) -> tuple[int, int]:
        grid = self.engine.grid
        return grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()

    @property
    def micro_batches_stepped(self) -> int:
        return int(self.engine.global_steps) * self.micro_batches_per_batch

    def bind_training_iterator(self, iterator: Iterator[Any] | None) -> None:
        self._training_iterator = iterator
        self.engine.set_dataiterator(iterator)

    def bind_validation_round(
        self, validation_round: ValidationRound | None, iterator: Iterator[Any] | None
    ) -> None:
        self._round, self._round_iterator = validation_round, iterator
        if validation_round is None:
            self._shape = None

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on one batch; return the mean loss over all replicas' micro batches.

        ``data_iter`` yields the micro batches; None uses the iterator of ``bind_training_iterator``. The loss has shape (), and
        is equal on every rank.

        Raises:
            DataError: the iterator ends within the batch, or the shape of the inputs changes.
            TrialContractError: a rank of the first or last stage has no iterator.

        Ranks: all, collectively.
        """
        iterator = self._training_iterator if data_iter is None else data_iter
        self._require_data("train_batch", self.engine.data_iterator if iterator is None else iterator)
        self._use_shape(_TRAINING_SHAPE)
        try:
            loss: torch.Tensor = type(self.engine).train_batch(self.engine, self._of_one_shape(iterator))
        except StopIteration as ended:
            raise self._ran_out("train_batch", self.engine.micro_batches) from ended
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: Literal["avg"] | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate the round of ``bind_validation_round``; return the mean loss.

        The loss has shape (), and is the mean over the round's records on all replicas. Repeated records do not count; if there
        are no others, the loss is NaN. If ``bcast_loss`` is True, every rank gets the loss; otherwise only the last stage does.

        Without a round, or if ``return_logits``, ``compute_loss``, ``reduce_output`` or ``num_micro_batches`` differs from its
        default, the result is that of DeepSpeed's own ``eval_batch``.

        Raises:
            DataError: the iterator ends within the round, or the shape of the inputs changes.
            TrialContractError: the loss is not a single number, or a rank of the first or last stage has no iterator.

        Ranks: all, collectively.
        """
        iterator = self._round_iterator if data_iter is None else data_iter
        self._require_data("eval_batch", iterator)
        is_default = (
            compute_loss and not return_logits and reduce_output == "avg" and num_micro_batches is None
        )
        served = self._round if is_default else None
        if served is None:
            self._use_shape(None)
        else:
            num_micro_batches = served.num_micro_batches
            self._weights = served.micro_batch_records if served.records else (0,) * num_micro_batches
            self._use_shape(None if served.is_ragged else _VALIDATION_SHAPE)
        kept = _SavedState.of(self.engine)
        engines.forget_losses(self.engine)
        try:
            output = type(self.engine).eval_batch(
                self.engine,
                self._of_one_shape(iterator),
                return_logits=return_logits,
                compute_loss=compute_loss,
                reduce_output=reduce_output,
                bcast_loss=bcast_loss,
                num_micro_batches=num_micro_batches,
            )
        except StopIteration as ended:
            raise self._ran_out("eval_batch", num_micro_batches or self.engine.micro_batches) from ended
        finally:
            self._weights = None
        kept.restore(self.engine)
        return output.reshape(()) if served is not None and isinstance(output, torch.Tensor) else output

    def reduce_outputs(
        self,
        outputs: list[Any],
        reduce: str | None = "avg",
        reduce_dp: bool = True,
        micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss of micro batches; replaces DeepSpeed's ``_reduce_outputs``.

        In a validation round, the mean is weighted by records. Otherwise DeepSpeed's own method computes the result.
        """
        # Ranks: the last stage of every replica, collectively.
        if self._weights is None:
            return engines.reduce_outputs(self.engine, outputs, reduce, reduce_dp, micro_batches)
        for loss in outputs:
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise TrialContractError(
                    f"eval_batch(): the loss of a micro batch is of shape {shape!r}; expected a single "
                    "number. Return the mean loss from loss_fn, or call eval_batch with reduce_output=None."
                )
        total = torch.zeros(2, dtype=torch.float32, device=self.engine.device)
        for loss, weight in zip(outputs, self._weights, strict=True):
            if weight:
                total[0] += loss.detach().reshape(()).float() * weight
        total[1] = sum(self._weights)
        if self.engine.is_data_parallel:
            comm.all_reduce(total, group=self.engine.mpu.get_data_parallel_group())
        return total[0] / total[1]

    def _use_shape(self, shape: str | None) -> None:
        """Reset the stage's activation buffers unless they were made for ``shape``.

        ``shape`` is ``_TRAINING_SHAPE`` or ``_VALIDATION_SHAPE``; None always resets.
        """
        if shape is None or shape != self._shape:
            self.engine.reset_activation_shape()
            self._input_shapes = None
        self._shape = shape

    def _of_one_shape(self, iterator: Iterator[Any] | None) -> Iterator[Any] | None:
        """Wrap ``iterator`` to raise ``DataError`` if the shape of the inputs changes.

        If the shape may change (``dynamic_shape``, or only one stage), ``iterator`` itself is returned.
        """
        if iterator is None or self.engine.module.dynamic_shape or self.engine.num_stages == 1:
            return iterator
        return self._checked(iterator)

    def _checked(self, iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            inputs = item[0] if isinstance(item, tuple | list) and item else item
            parts = inputs if isinstance(inputs, tuple | list) else (inputs,)
            shapes = [tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)]
            if self._input_shapes is None:
                self._input_shapes = shapes
            elif shapes != self._input_shapes:
                raise DataError(
                    f"on {describe_rank(self.engine)} a micro batch has inputs of shapes {shapes} after {self._input_shapes}; "
                    "expected one shape, because the stages of a pipeline keep their buffers. Pad the records, use "
                    "drop_last=True, or build PipelineModule(dynamic_shape=True)."
                )
            yield item

    def _require_data(self, call: str, iterator: Iterator[Any] | None) -> None:
        if iterator is None and (self.engine.is_first_stage() or self.engine.is_last_stage()):
            raise TrialContractError(
                f"{call}() on {describe_rank(self.engine)} has no data; expected to be called while the training "
                "loop has a loader bound. Call it inside the trial's train_batch or evaluate_batch, or pass an "
                "iterator of micro batches."
            )

    def _ran_out(self, call: str, num_micro_batches: int) -> DataError:
        return DataError(
            f"{call}() on {describe_rank(self.engine)} ran out of data; expected {num_micro_batches} micro "
            "batches. Give every rank of the first and last stage equally many."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _SavedState:
    """State of a pipeline engine before an evaluation, restored after the evaluation."""

    # With ``seed_layers``, each forward pass increments ``micro_offset``, and seeds the global random generators with
    # ``micro_offset``. Forward passes of an evaluation do the same.

    micro_offset: int
    generators: RngState | None

    @classmethod
    def of(cls, engine: PipelineEngine) -> _SavedState:
        generators = RngState.read(engine.device) if engine.module.seed_layers else None
        return cls(micro_offset=engine.module.micro_offset, generators=generators)

    def restore(self, engine: PipelineEngine) -> None:
        engine.module.micro_offset = self.micro_offset
        if self.generators is not None:
            self.generators.restore(engine.device)
