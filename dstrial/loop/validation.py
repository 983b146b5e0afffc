"""Evaluate each validation record once; metrics are weighted by records."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from determined import pytorch, util

from dstrial.engine.adapters.validation_plan import ValidationRound
from dstrial.errors import DataError, TrialContractError
from dstrial.loop import metrics as loop_metrics
from dstrial.loop import sync_point
from dstrial.loop.callbacks import Callbacks
from dstrial.loop.data.validation import Extent, ValidationStream
from dstrial.loop.run_state import Snapshot
from dstrial.trial.context import DeepSpeedTrialContext, runtime_of
from dstrial.trial.determined_errors import FullDatasetError, InvalidTrialError
from dstrial.trial.trial import DeepSpeedTrial

logger = logging.getLogger("dstrial.loop")


class Validation:
    """Runs the validations of one trial.

    Args:
        stream: this rank's validation records; the stream has no loader on ranks that read none.
        max_rounds: maximum number of ``evaluate_batch`` calls per validation, for test runs; None for no limit.
    """

    def __init__(
        self,
        trial: DeepSpeedTrial,
        context: DeepSpeedTrialContext,
        callbacks: Callbacks,
        stream: ValidationStream,
        max_rounds: int | None = None,
    ) -> None:
        self._trial = trial
        self._context = context
        self._runtime = runtime_of(context)
        self._callbacks = callbacks
        self._stream = stream
        self._max_rounds = max_rounds
        self._extent = Extent()
        self._is_collective = self._runtime.forward_is_collective
        self._on_chief_only = util.is_overridden(trial.evaluate_full_dataset, DeepSpeedTrial)
        self._takes_batch_idx = util.has_param(trial.evaluate_batch, "batch_idx", 2)

    def agree_on_extent(self) -> bool:
        """Compare all ranks' validation loaders; return whether any rank has a loader.

        Raises:
            DataError: a loader is missing or empty, or lengths differ although all replicas must evaluate equally often.
            TrialContractError: the trial overrides no evaluation method, or overrides ``evaluate_full_dataset`` although its
                engines need all ranks in each forward pass.

        Ranks: all, collectively.
        """
        context = self._context
        gathered = context.distributed.allgather(
            (self._runtime.mpu.should_build_data_loader, self._stream.extent)
        )
        readers = [(rank, extent) for rank, (_, extent) in enumerate(gathered) if extent is not None]
        if not readers:
            return False
        first_rank, first = readers[0]
        without = [rank for rank, (reads, extent) in enumerate(gathered) if reads and extent is None]
        if without:
            raise DataError(
                f"build_validation_data_loader returned None on rank {without[0]} and a loader on rank {first_rank}; "
                "expected the same on all ranks that read records. Return a loader on all of them, or on none."
            )
        empty = [rank for rank, extent in readers if extent.is_empty]
        if empty:
            raise DataError(
                f"the validation loader of rank {empty[0]} is empty; expected at least one record. Fill it, or return None."
            )
        for rank, extent in readers[1:]:
            if extent != first and (first.num_records is not None or self._is_collective):
                raise DataError(
                    f"the validation loaders differ: {extent} on rank {rank} and {first} on rank {first_rank}; expected "
                    "the same on all ranks, because all of them evaluate together. Build the same loader everywhere."
                )
        self._extent = first
        if self._on_chief_only:
            if self._is_collective:
                raise TrialContractError(
                    "evaluate_full_dataset runs on the chief alone, but every forward pass of this engine (ZeRO 3 or a "
                    "pipeline) needs all ranks; expected evaluate_batch. Override evaluate_batch instead."
                )
        elif not util.is_overridden(self._trial.evaluate_batch, DeepSpeedTrial):
            raise TrialContractError(
                f"{type(self._trial).__name__} overrides neither evaluate_batch nor evaluate_full_dataset; expected one of "
                "them, because there is validation data. Write one, or return None from build_validation_data_loader."
            )
        return True

    def run(self) -> dict[str, Any]:
        """Validate with the current weights; return the metrics, the same on every rank.

        Ranks: all, collectively.
        """
        context = self._context
        start_s = time.monotonic()
        training_reducers = [
            wrapped.reducer for wrapped in self._runtime.wrapped_reducers if wrapped.for_training
        ]
        open_window = Snapshot(training_reducers)
        for wrapped in self._runtime.wrapped_reducers:
            if wrapped.for_validation:
                wrapped.reset()
        self._runtime.set_training(False)
        self._callbacks.call("on_validation_start")
        try:
            with torch.no_grad():
                results, num_records = self._full_dataset() if self._on_chief_only else self._by_batches()
                results.update(loop_metrics.as_numpy(context.reduce_metrics(for_training=False)))
        finally:
            for adapter in self._runtime.adapters:
                adapter.bind_validation_round(None, None)
                adapter.set_training(True)
            open_window.restore()
        self._callbacks.call("on_validation_end", results)
        if context.distributed.rank == 0:
            elapsed_s = time.monotonic() - start_s
            logger.debug("validated %s records in %.1f s", num_records if num_records else "all", elapsed_s)
        return results

    def _full_dataset(self) -> tuple[dict[str, Any], int]:
        def evaluate() -> dict[str, Any]:
            returned = self._trial.evaluate_full_dataset(self._stream.full_loader())
            if not isinstance(returned, Mapping):
                raise FullDatasetError(
                    "evaluate_full_dataset: eval() must return a dictionary from metric name to value, got "
                    f"{type(returned).__name__}. Return a dict."
                )
            return loop_metrics.as_numpy(returned)

        distributed = self._context.distributed
        results = sync_point.result_of_chief(distributed, "evaluate_full_dataset", evaluate)
        return results, self._extent.num_records or 0

    def _by_batches(self) -> tuple[dict[str, Any], int]:
        reducer_of = self._reducer_of()
        keep = self._callbacks.overrides("on_validation_epoch_end")
        window = loop_metrics.MetricWindow("evaluate_batch", reducer_of, keep_batches=keep)
        num_records = 0
        self._callbacks.call("on_validation_epoch_start")
        for batch_idx, (validation_round, items) in enumerate(self._stream.rounds(self._extent)):
            if self._max_rounds is not None and batch_idx >= self._max_rounds:
                break
            num_records += self._evaluate_round(batch_idx, validation_round, items, window)
        self._callbacks.call("on_validation_epoch_end", window.batches())
        share = window.totals() if self._runtime.mpu.should_report_metrics and len(window) else None
        counted = num_records if self._runtime.mpu.should_report_metrics else 0
        gathered = self._context.distributed.allgather((share, counted))
        values = loop_metrics.combine([part for part, _ in gathered], "evaluate_batch", reducer_of)
        _require_numbers(values)
        return dict(values), sum(count for _, count in gathered)

    def _evaluate_round(
        self,
        batch_idx: int,
        validation_round: ValidationRound,
        items: Iterator[Any] | None,
        window: loop_metrics.MetricWindow,
    ) -> int:
        """Call ``evaluate_batch`` for a round, unless empty; return the number of records."""
        if validation_round.num_micro_batches == 0:
            return 0
        for adapter in self._runtime.adapters:
            adapter.bind_validation_round(validation_round, items)
        is_filler = validation_round.is_filler
        before = (
            Snapshot(wrapped.reducer for wrapped in self._runtime.wrapped_reducers) if is_filler else None
        )
        arguments = (items, batch_idx) if self._takes_batch_idx else (items,)
        returned: Any = self._trial.evaluate_batch(*arguments)
        if before is not None:
            before.restore()
        if self._runtime.mpu.should_report_metrics and not is_filler:
            if not isinstance(returned, Mapping):
                raise InvalidTrialError(
                    f"evaluate_batch must return a dictionary from metric name to value, but returned {returned!r} of type "
                    f"{type(returned).__name__}. "
                    'Return for example {"validation_loss": loss}.'
                )
            window.add(returned, weight=validation_round.records)
        return validation_round.records

    def _reducer_of(self) -> loop_metrics.ReducerOf:
        chosen = self._trial.evaluation_reducer()
        if isinstance(chosen, pytorch.Reducer):
            return lambda _name: chosen
        if isinstance(chosen, Mapping) and all(
            isinstance(reducer, pytorch.Reducer) for reducer in chosen.values()
        ):
            return lambda name: self._reducer_named(chosen, name)
        raise TrialContractError(
            f"evaluation_reducer returned {chosen!r}; expected a determined.pytorch.Reducer or a dict of them by metric "
            "name. Return Reducer.AVG, SUM, MAX or MIN."
        )

    @staticmethod
    def _reducer_named(chosen: Mapping[str, pytorch.Reducer], name: str) -> pytorch.Reducer:
        if name not in chosen:
            raise TrialContractError(
                f"evaluation_reducer names {sorted(chosen)}, but evaluate_batch returned {name!r}; expected a reducer for "
                "every metric. Add it, or return one reducer for all."
            )
        return chosen[name]


def _require_numbers(values: Mapping[str, float | None]) -> None:
    bad = [name for name, value in values.items() if value is None]
    if bad:
        raise InvalidTrialError(
            f"evaluate_batch returned metrics that are no numbers: {bad}; expected numbers or arrays of numbers, which "
            "can be averaged. Drop them, or combine them with context.wrap_reducer."
        )
