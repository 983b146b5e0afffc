"""Looking for the searcher's metric before the first batch, in the evaluation of one batch that leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import determined as det

from dstrial.errors import PeerFailedError, RankError, TrialContractError
from dstrial.loop import rescue
from dstrial.loop.settings import LoopSettings
from dstrial.loop.undo import Undo
from dstrial.loop.validation import Validation
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.det_errors import SearcherMetricError

logger = logging.getLogger("dstrial.loop")

NEVER_MISSING = ("batches", "epochs")
"""Metrics that the loop itself adds to every validation."""


def is_wanted(settings: LoopSettings, context: DeepSpeedTrialContext) -> bool:
    """Say whether the metric is to be looked for; the same on all ranks.

    By default it is not for pipelines, whose stages exchange activations of a round's shape for it.
    """
    searched = settings.searcher_metric
    if searched is None or searched in NEVER_MISSING or settings.is_rewrite:
        return False
    asked = settings.checks.early_metric_check
    return not context.use_pipeline_parallel if asked is None else asked


def check_metric(
    searched: str, validation: Validation, context: DeepSpeedTrialContext, objects: Iterable[Any]
) -> None:
    """Evaluate one round, put everything back, and refuse a searcher's metric that is not there.

    User code that raises is no reason not to train, as it may need what only training sets up, unless it says ``InvalidHP``.

    Args:
        searched: the searcher's metric.
        validation: of the trial, its extent agreed on.
        context: of the trial.
        objects: whose attributes are put back: the trial and the data sets.

    Raises:
        TrialContractError: the metric is missing, or ``evaluate_batch`` breaks its contract; the same on all ranks.
        InvalidHP: ``evaluate_batch`` has raised it.

    Ranks: all, collectively.
    """
    undo = Undo(context, objects)
    names: set[str] | None = None
    error: Exception | None = None
    try:
        names = validation.sample()
    except (TrialContractError, det.InvalidHP):
        raise
    except Exception as caught:  # noqa: BLE001  # user code fails as it likes
        error = caught
    if error is not None and (not validation.is_agreed or _is_final(error)):
        raise error
    undo.undo()
    is_chief = context.distributed.rank == 0
    if error is not None:
        if is_chief:
            logger.warning(
                "searcher.metric %r is looked for at the first validation: evaluating one batch before training has failed "
                "(%s)",
                searched,
                rescue.described(error),
            )
    elif names is not None and searched not in names:
        raise SearcherMetricError(
            f"the searcher's metric is {searched!r}, but validation returned {sorted(names)} for its first batch, before "
            "training; expected it among them. Return it from evaluate_batch, or set searcher.metric to one of them."
        )


def _is_final(error: Exception) -> bool:
    """Say whether another rank ends with this error: one that is lost, or whose trial breaks its contract or gives up."""
    if isinstance(error, PeerFailedError):
        return any(f"({kind.__name__}: " in str(error) for kind in (TrialContractError, det.InvalidHP))
    return isinstance(error, RankError)
