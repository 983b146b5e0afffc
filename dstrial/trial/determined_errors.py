"""Errors that are also of the types that Determined raises in the same places.

They are shown under the name of ``dstrial.errors`` that they also are; ``dstrial.errors`` itself imports nothing of Determined.

Source: determined 0.38.1, ``pytorch/deepspeed/_deepspeed_context.py`` and ``_deepspeed_trial.py``.
"""

from __future__ import annotations

from determined import errors

from dstrial.errors import TrialContractError


# Determined's is a BaseException; with TrialContractError first it is an Exception all the same.
class InvalidTrialError(TrialContractError, errors.InvalidExperimentException):  # type: ignore[misc]  # untyped
    """There: ``InvalidExperimentException``. No wrapped engine, or no metrics by name."""


class MetricNamesError(InvalidTrialError, ValueError):
    """There: ``ValueError``. Names of metrics differ between batches or ranks."""


class SearcherMetricError(TrialContractError, RuntimeError):
    """There: ``RuntimeError``. The searcher's metric is missing or no number."""


class ForeignLoaderError(TrialContractError, RuntimeError):
    """There: ``RuntimeError``. A loader is not one whose order is reproducible."""


class FullDatasetError(TrialContractError, TypeError):
    """There: ``TypeError``. ``evaluate_full_dataset`` returned no dict."""


class AccumulationError(TrialContractError, AssertionError):
    """There: ``AssertionError``. ``train_batch`` accumulated too few or many batches."""


class _Internal(errors.InternalException):  # type: ignore[misc]  # untyped
    """Determined's, without asking its reader to write to Determined."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.message = message


class NotTrainingError(TrialContractError, _Internal):
    """There: ``InternalException``. The position is asked for before training."""

    __init__ = _Internal.__init__


class NoSeedError(_Internal, ValueError):
    """There: ``InternalException``. No trial seed is configured."""


for _class in (
    InvalidTrialError,
    MetricNamesError,
    SearcherMetricError,
    ForeignLoaderError,
    FullDatasetError,
    AccumulationError,
    NotTrainingError,
):
    _class.__module__ = TrialContractError.__module__
    _class.__name__ = _class.__qualname__ = TrialContractError.__name__
NoSeedError.__module__, NoSeedError.__name__, NoSeedError.__qualname__ = (
    "builtins",
    "ValueError",
    "ValueError",
)
