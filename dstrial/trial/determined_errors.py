"""Errors of dstrial that are also instances of the errors which Determined raises.

Source: determined 0.38.1, ``pytorch/deepspeed/_deepspeed_context.py`` and ``_deepspeed_trial.py``.
"""

from __future__ import annotations

from determined import errors

from dstrial.errors import TrialContractError


# Determined's class is only a BaseException; TrialContractError makes this class an Exception.
class InvalidTrialError(TrialContractError, errors.InvalidExperimentException):  # type: ignore[misc]  # untyped
    """The trial is invalid, for example because it has no engine.

    Also an ``InvalidExperimentException`` of Determined.
    """


class MetricNamesError(InvalidTrialError, ValueError):
    """Metric names differ between batches or ranks; also a ``ValueError``."""


class SearcherMetricError(TrialContractError, RuntimeError):
    """Metric ``searcher.metric`` is missing or not a number; also a ``RuntimeError``."""


class ForeignLoaderError(TrialContractError, RuntimeError):
    """A loader is no ``DataLoader`` of dstrial or Determined; also a ``RuntimeError``.

    ``context.disable_dataset_reproducibility_checks()`` allows other loaders.
    """


class FullDatasetError(TrialContractError, TypeError):
    """``evaluate_full_dataset`` did not return a dict; also a ``TypeError``."""


class AccumulationError(TrialContractError, AssertionError):
    """A wrong number of micro batches was trained; also an ``AssertionError``."""


class _Internal(errors.InternalException):  # type: ignore[misc]  # untyped
    """``InternalException`` whose message does not ask users to contact Determined."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)
        self.message = message


class NotTrainingError(TrialContractError, _Internal):
    """The current batch or epoch was requested before training or cannot be computed.

    The epoch cannot be computed if the training loader has no length.
    Also an ``InternalException`` of Determined.
    """

    __init__ = _Internal.__init__


class NoSeedError(_Internal, ValueError):
    """No trial seed is configured.

    Also a ``ValueError``, and an ``InternalException`` of Determined.
    """
