"""What a ``Reporter`` sends: metrics, progress, and whether a validation is best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined import core, util

from dstrial.errors import TrialContractError
from dstrial.integrations.accelerate.progress_tracker import RunSchedule
from dstrial.local.mirror import MirroredTrainContext
from dstrial.local.train_context import LocalTrainContext
from dstrial.loop.boundaries import asks_for_checkpoint
from dstrial.loop.metric_sinks import MetricSinks
from dstrial.loop.metrics import MetricWindow, combine


class MetricReports:
    """Reports to a core context and to the sinks of a run."""

    def __init__(self, core_context: core.Context, sinks: MetricSinks, plan: RunSchedule) -> None:
        self._core = core_context
        self._sinks = sinks
        self._plan = plan

    def mean_over_ranks(self, metrics: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return each metric's mean; ``where`` names the method. Ranks: all, collectively."""
        own = MetricWindow(where)
        own.add(metrics)
        return dict(combine(self._core.distributed.allgather(own.totals()), where))

    def training(
        self,
        metrics: dict[str, Any],
        batches_trained: int,
        num_batches: int = 0,
        records_per_batch: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Report training metrics on rank 0, with the speed if batches were counted."""
        reported = dict(metrics)
        if num_batches:
            per_second = num_batches / max(seconds, 1e-9)
            reported.setdefault("batches_per_second", per_second)
            reported.setdefault("samples_per_second", per_second * records_per_batch)
        self._core.train.report_training_metrics(steps_completed=batches_trained, metrics=reported)
        self._sinks.report("training", batches_trained, reported)

    def progress(self, batches_trained: int, batches_total: int | None) -> None:
        if batches_total is None:
            return
        train = self._core.train
        if isinstance(train, (LocalTrainContext, MirroredTrainContext)):
            train.report_batches(batches_trained, batches_total)
        train.report_progress(min(batches_trained / batches_total, 1.0))

    def require_searcher_metric(self, metrics: Mapping[str, Any]) -> None:
        """Refuse validation metrics that the searcher cannot compare."""
        searched = self._plan.metric
        if searched is None or searched in ("batches", "epochs"):
            return
        if not util.is_numerical_scalar(metrics.get(searched)):
            raise TrialContractError(
                f"the searcher's metric {searched!r} is {metrics.get(searched)!r} in reporter.report_validation; expected one "
                f"number among {sorted(metrics)}. Report it, or set searcher.metric to one of them."
            )

    def validation(self, metrics: Mapping[str, Any], batches_trained: int, epochs_trained: int) -> bool:
        """Report validation metrics on rank 0; return whether to save a checkpoint."""
        plan = self._plan
        is_best = plan.checkpoint_policy == "best"
        best_before = self._core.train.get_experiment_best_validation() if is_best else None
        self._sinks.report("validation", batches_trained, metrics)
        reported = {"batches": batches_trained, "epochs": epochs_trained, **metrics}
        self._core.train.report_validation_metrics(steps_completed=batches_trained, metrics=reported)
        now = reported.get(str(plan.metric))
        return asks_for_checkpoint(
            plan.checkpoint_policy, now, best_before, smaller_is_better=plan.smaller_is_better
        )
