"""Running totals of metrics on each rank, which are combined over all ranks.

``MetricWindow.add`` neither synchronises nor communicates; ``totals`` moves all sums to the host in two copies per device.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from determined import pytorch

from dstrial.trial.determined_errors import InvalidTrialError, MetricNamesError

_IMMUTABLE = (float, int, str, bool, type(None))


@dataclasses.dataclass(frozen=True, slots=True)
class MetricTotals:
    """One rank's totals for a metric report, in plain Python types.

    Attributes:
        values: metric name -> total (weighted sum, sum, minimum or maximum); None if any value is not a number.
        weight: sum of weights, by which totals are divided for a mean.
        finite: loss name -> whether any value is finite; empty unless losses are watched.
    """

    values: dict[str, float | None]
    weight: float
    finite: dict[str, bool] = dataclasses.field(default_factory=dict)


def as_mapping(returned: Any, where: str) -> Mapping[str, Any]:
    """Return a ``train_batch`` or ``evaluate_batch`` result as metric name -> value.

    A tensor becomes ``{"loss": tensor}``. ``where`` is the method's name for the error message.

    Raises:
        InvalidTrialError: the result is neither a mapping nor a tensor.
    """
    if returned.__class__ is dict or isinstance(returned, Mapping):
        return returned
    if isinstance(returned, torch.Tensor):
        return {"loss": returned}
    raise InvalidTrialError(
        f"{where} must return a dictionary from metric name to value, but returned {returned!r} of type "
        f"{type(returned).__name__}. "
        'Return for example {"loss": loss}.'
    )


def as_numpy(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of metrics, with tensors as NumPy arrays; synchronise devices."""
    return {k: v.cpu().numpy() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}


def copied(value: Any) -> Any:
    """Return a deep copy of a value; the value itself if it cannot be copied."""
    if type(value) in _IMMUTABLE:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # user objects fail to copy in any way they like
        return value


Amount: TypeAlias = torch.Tensor | float
"""A number of a metric: a tensor of shape () on an accelerator, a Python number on the CPU, where tensors cost more."""


def _amount_of(value: Any) -> Amount | None:
    """Return a number, or the mean of an array or tensor; None for other values.

    The mean of a tensor on an accelerator is a new tensor there, computed without synchronising the device.
    """
    if isinstance(value, torch.Tensor):
        if value.is_cpu:
            return float(value.detach().double().mean() if value.ndim else value.item())
        dtype = (
            torch.float32 if value.device.type == "mps" else torch.float64
        )  # Apple's devices have no float64
        return value.detach().to(dtype, copy=True).mean()
    if value.__class__ is float:
        return float(value)
    try:
        array = np.asarray(value)
        return float(array.mean()) if array.dtype.kind in "biuf" and array.size else None
    except (TypeError, ValueError):
        return None


def _on_host(amounts: Mapping[str, Amount | None]) -> dict[str, float | None]:
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    values: dict[str, float | None] = dict.fromkeys(amounts)
    for name, amount in amounts.items():
        if isinstance(amount, torch.Tensor):
            by_device.setdefault(amount.device, {})[name] = amount
        else:
            values[name] = amount
    for on_device in by_device.values():
        values.update(zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True))
    return values


def _combined(held: Amount, amount: Amount, reducer: pytorch.Reducer) -> Amount:
    if reducer in (pytorch.Reducer.AVG, pytorch.Reducer.SUM):
        return held + amount
    is_max = reducer is pytorch.Reducer.MAX  # all four functions propagate NaN
    for one, other in ((held, amount), (amount, held)):
        if isinstance(one, torch.Tensor):
            return (torch.maximum if is_max else torch.minimum)(one, torch.as_tensor(other).to(one))
    return float((np.maximum if is_max else np.minimum)(held, amount))


def _finite(amount: Amount) -> Amount:
    """Return 1.0 if an amount is finite, else 0.0."""
    if isinstance(amount, torch.Tensor):
        return amount.isfinite().to(amount.dtype)
    return float(math.isfinite(amount))


def losses_among(names: Iterable[str]) -> list[str]:
    """Return the metric names that contain "loss"; all names if no name does."""
    all_names = list(names)
    return [name for name in all_names if "loss" in name.lower()] or all_names


ReducerOf = Callable[[str], pytorch.Reducer]


def average(_name: str) -> pytorch.Reducer:
    return pytorch.Reducer.AVG


class MetricWindow:
    """Running totals of one rank's metrics since the last report, by metric name.

    Args:
        where: name of the method that returns the metrics, for error messages.
        reducer_of: function that returns the reducer for a metric name; by default the mean.
        keep_batches: whether to keep the metrics of every ``add``, for callbacks.
        watches_losses: whether to fill ``MetricTotals.finite``, for ``NonFiniteGuard``.
    """

    def __init__(
        self,
        where: str,
        reducer_of: ReducerOf = average,
        keep_batches: bool = False,
        *,
        watches_losses: bool = False,
    ) -> None:
        self.where = where
        self._watches_losses = watches_losses
        self._newest_losses: dict[str, Amount | None] = {}
        self._has_finite: dict[str, Amount | None] = {}  # by loss: 1.0 once a value was finite
        self._reducer_of = reducer_of
        self._keep_batches = keep_batches
        self._totals: dict[str, Amount | None] = {}
        self._weight = 0.0
        self._num_calls = 0
        self._batches: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return self._num_calls

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add the metrics of one call, without communication or device synchronisation.

        Args:
            metrics: metric name -> Python or NumPy number, array, nested list, or tensor of any shape and device. Arrays,
                lists and tensors count as the mean of their elements.
            weight: weight of these metrics in a mean, for example the number of records.

        Raises:
            TrialContractError: the metric names differ from those of earlier calls.
        """
        totals = self._totals
        if self._watches_losses and not self._num_calls:
            self._newest_losses = dict.fromkeys(losses_among(metrics))
        if self._num_calls and (len(metrics) != len(totals) or metrics.keys() != totals.keys()):
            # Determined's message, 0.38.1 _deepspeed_trial.py.
            rule = "Validation metric names must match across all batches of data: "
            raise MetricNamesError(
                f"{rule if self.where == 'evaluate_batch' else ''}{self.where} returned the metrics {sorted(metrics)}; "
                f"expected {sorted(totals)} as in the calls before. Return the same metric names every time."
            )
        for name, value in metrics.items():
            amount = _amount_of(value)
            if name in self._newest_losses:
                self._newest_losses[name] = amount
                if amount is not None:
                    before = self._has_finite.get(name)
                    if before is None:
                        self._has_finite[name] = _finite(amount)
                    elif isinstance(before, torch.Tensor) or not before:
                        self._has_finite[name] = _combined(before, _finite(amount), pytorch.Reducer.MAX)
            reducer = self._reducer_of(name)
            if amount is not None and reducer is pytorch.Reducer.AVG:
                amount = amount * weight
            if name in totals and amount is not None:
                held = totals[name]
                amount = None if held is None else _combined(held, amount, reducer)
            totals[name] = amount
        self._weight += weight
        self._num_calls += 1
        if self._keep_batches:
            self._batches.append(
                {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}
            )

    def totals(self) -> MetricTotals:
        """Move all totals to the host, with two copies per device."""
        finite = {name: bool(value) for name, value in _on_host(self._has_finite).items()}
        return MetricTotals(_on_host(self._totals), self._weight, finite)

    def batches(self) -> list[dict[str, Any]]:
        """Return the metrics of each ``add`` since ``reset``; [] unless ``keep_batches``.

        Tensors become NumPy arrays.
        """
        return [
            {k: v.cpu().float().numpy() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            for batch in self._batches
        ]

    def reset(self) -> None:
        self._totals = {}
        self._has_finite = {}
        self._weight = 0.0
        self._num_calls = 0
        self._batches = []

    def newest_is_finite(self) -> bool | None:
        """Return whether any loss's newest value is finite; None if no loss is known.

        Losses from before the last ``reset`` count too. The call synchronises the device.
        """
        newest = [loss for loss in self._newest_losses.values() if loss is not None]
        return any(math.isfinite(float(loss)) for loss in newest) if newest else None

    def state_dict(self) -> dict[str, Any]:
        """Return the totals since the last report, for a checkpoint."""
        return {
            "totals": dict(self._totals),
            "weight": self._weight,
            "num_calls": self._num_calls,
            "batches": list(self._batches),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._totals = {
            name: held.to(device) if isinstance(held, torch.Tensor) else held
            for name, held in state["totals"].items()
        }
        self._weight = float(state["weight"])
        self._num_calls = int(state["num_calls"])
        self._batches = list(state["batches"])


def combine(
    shares: Sequence[MetricTotals | None],
    where: str,
    reducer_of: ReducerOf = average,
) -> dict[str, float | None]:
    """Combine all ranks' totals into metric name -> value; None for non-numbers.

    ``shares`` has each rank's totals, or None for a rank that reports no metrics. ``where`` is the name of the method that
    returned the metrics, for the error message.

    Raises:
        TrialContractError: ranks report different metric names.
    """
    reporting = [(rank, share) for rank, share in enumerate(shares) if share is not None]
    if not reporting:
        return {}
    first_rank, first = reporting[0]
    for rank, share in reporting[1:]:
        if share.values.keys() != first.values.keys():
            raise MetricNamesError(
                f"{where} returned the metrics {sorted(share.values)} on rank {rank} and {sorted(first.values)} on "
                f"rank {first_rank}; expected the same names on all ranks. Return the same metric names everywhere."
            )
    combined: dict[str, float | None] = {}
    for name in first.values:
        amounts = [share.values[name] for _, share in reporting]
        numbers = [amount for amount in amounts if amount is not None]
        reducer = reducer_of(name)
        if len(numbers) < len(amounts):
            combined[name] = None
        elif reducer is pytorch.Reducer.AVG:
            weight = sum(share.weight for _, share in reporting)
            combined[name] = sum(numbers) / weight if weight else None
        elif reducer is pytorch.Reducer.SUM:
            combined[name] = sum(numbers)
        else:
            combined[name] = float(np.max(numbers) if reducer is pytorch.Reducer.MAX else np.min(numbers))
    return combined
