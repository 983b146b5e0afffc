"""Running totals of metrics on each rank, which are combined over all ranks.

``MetricWindow.add`` neither synchronises nor communicates; ``totals`` moves all sums to the host in one copy per device.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from determined import pytorch

from dstrial.trial.determined_errors import InvalidTrialError, MetricNamesError

_MAX_LOSSES_HELD = 4096
"""Number of newest losses held until the next report, which checks whether any is finite."""

_MAX_BYTES_HELD = 64  # a kept loss that references a larger storage is copied

_IMMUTABLE = (float, int, str, bool, type(None))


@dataclasses.dataclass(frozen=True, slots=True)
class MetricTotals:
    """One rank's totals for a metric report, in plain Python types.

    Attributes:
        values: metric name -> total (weighted sum, sum, minimum or maximum); None if any value is not a number.
        weights: metric name -> sum of weights, by which the total is divided for a mean.
        finite: loss name -> whether any of the loss's values is finite; empty unless losses are watched.
    """

    values: dict[str, float | None]
    weights: dict[str, float]
    finite: dict[str, bool] = dataclasses.field(default_factory=dict)

    def pack(self) -> PackedTotals:
        """Return the totals as builtins, which unpickle ten times as fast as dataclasses."""
        return self.values, self.weights, self.finite

    @classmethod
    def unpack(cls, packed: PackedTotals) -> MetricTotals:
        return cls(*packed)


PackedTotals: TypeAlias = tuple[dict[str, float | None], dict[str, float], dict[str, bool]]


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


def copied(value: Any) -> Any:
    """Return a deep copy of a value; the value itself if it cannot be copied."""
    if type(value) in _IMMUTABLE:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001  # user objects fail to copy in any way they like
        return value


def _host_number(value: Any) -> float | None:
    """Return a number as float, or the mean of an array or list; None for others."""
    if isinstance(value, (int, float)):
        return float(value)
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.size == 0:
            return None
        return float(array.mean())
    except (TypeError, ValueError):
        return None


def _accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _combine_on_device(
    held: torch.Tensor | float | None, amount: torch.Tensor, reducer: pytorch.Reducer, weight: float
) -> torch.Tensor:
    dtype = _accumulation_dtype(amount)
    if reducer is pytorch.Reducer.AVG:
        if isinstance(held, torch.Tensor):
            return held.add_(amount, alpha=weight)
        return amount.to(dtype, copy=True).mul_(weight).add_(held or 0.0)
    if held is None:
        return amount.to(dtype, copy=True)
    if reducer is pytorch.Reducer.SUM:
        return amount.to(dtype) + held
    choose = torch.maximum if reducer is pytorch.Reducer.MAX else torch.minimum
    return choose(amount.to(dtype), torch.as_tensor(held, dtype=dtype, device=amount.device))


def losses_among(names: Iterable[str]) -> list[str]:
    """Return the metric names that contain "loss"; all names if none does."""
    all_names = list(names)
    return [name for name in all_names if "loss" in name.lower()] or all_names


def _held_alone(amount: torch.Tensor | float) -> torch.Tensor | float:
    """Return ``amount``, or a clone if ``amount`` references a large storage."""
    if isinstance(amount, torch.Tensor) and amount.untyped_storage().nbytes() > _MAX_BYTES_HELD:
        return amount.clone()
    return amount


def _has_finite(losses: Iterable[torch.Tensor | float], total: float | None) -> bool:
    """Return whether any loss is finite; ``total``, if finite, proves that all are."""
    if total is not None and math.isfinite(total):
        return True
    tensors = [loss.double() for loss in losses if isinstance(loss, torch.Tensor)]
    numbers = [loss for loss in losses if not isinstance(loss, torch.Tensor)]
    return any(map(math.isfinite, [*numbers, *(torch.stack(tensors).tolist() if tensors else ())]))


ReducerOf = Callable[[str], pytorch.Reducer]


def average(_name: str) -> pytorch.Reducer:
    return pytorch.Reducer.AVG


class AsyncTotals:
    """One rank's metric totals while an asynchronous copy moves them to the host."""

    def __init__(self, held: Mapping[str, Any], weight: float, losses: Mapping[str, Sequence[Any]]) -> None:
        self._held = dict(held)
        self._weight = weight
        self._losses = losses
        by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for name, total in held.items():
            if isinstance(total, torch.Tensor):
                by_device.setdefault(total.device, {})[name] = total
        self._copies = [
            (list(tensors), *_start_copy(torch.stack(list(tensors.values()))))
            for tensors in by_device.values()
        ]

    def wait(self) -> MetricTotals:
        """Wait until the copy has finished; return the totals."""
        moved: dict[str, float] = {}
        for names, totals, is_copied in self._copies:
            if is_copied is not None:
                is_copied.synchronize()
            moved.update(zip(names, totals.tolist(), strict=True))
        values = {name: moved.get(name, held) for name, held in self._held.items()}
        finite = {
            name: _has_finite(losses, values.get(name)) for name, losses in self._losses.items() if losses
        }
        return MetricTotals(values, dict.fromkeys(values, self._weight), finite)


def _start_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Start to copy a tensor to the host; return the copy and its completion event."""
    if tensor.device.type != "cuda":
        return tensor, None  # the later ``tolist`` copies and blocks
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.device(tensor.device):
        host.copy_(tensor, non_blocking=True)
        is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_copied.record()
    return host, is_copied


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
        self._losses: dict[str, collections.deque[torch.Tensor | float]] = {}
        self._newest_losses: list[torch.Tensor | float] = []
        self._reducer_of = reducer_of
        self._is_average = reducer_of is average
        self._keep_batches = keep_batches
        self._totals: dict[str, Any] = {}
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
        if self._watches_losses and not self._losses:
            self._losses = {
                name: collections.deque(maxlen=_MAX_LOSSES_HELD) for name in losses_among(metrics)
            }
        if self._num_calls and (len(metrics) != len(totals) or metrics.keys() != totals.keys()):
            # Determined's message, 0.38.1 _deepspeed_trial.py.
            rule = "Validation metric names must match across all batches of data: "
            raise MetricNamesError(
                f"{rule if self.where == 'evaluate_batch' else ''}{self.where} returned the metrics {sorted(metrics)}; "
                f"expected {sorted(totals)} as in the calls before. Return the same metric names every time."
            )
        for name, value in metrics.items():
            amount: torch.Tensor | float | None
            if not isinstance(value, torch.Tensor):
                amount = _host_number(value)
            elif value.is_cpu:
                amount = value.item() if value.ndim == 0 else float(value.detach().double().mean())
            else:
                amount = value.detach()
                if amount.ndim:
                    amount = amount.to(_accumulation_dtype(amount)).mean()
            if name in self._losses and amount is not None:
                self._losses[name].append(_held_alone(amount))
            held = totals.get(name)
            if self._is_average and held.__class__ is float and amount.__class__ is float:
                totals[name] = held + amount * weight  # fast path: numbers on the CPU
            else:
                self._accumulate(name, amount, weight)
        self._weight += weight
        self._num_calls += 1
        if self._keep_batches:
            self._batches.append(
                {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in metrics.items()}
            )

    def _accumulate(self, name: str, amount: torch.Tensor | float | None, weight: float) -> None:
        held = self._totals.get(name)
        is_first = held is None and name not in self._totals
        reducer = self._reducer_of(name)
        if amount is None or (held is None and not is_first):
            self._totals[name] = None
        elif isinstance(amount, torch.Tensor):
            self._totals[name] = _combine_on_device(held, amount, reducer, weight)
        elif reducer is pytorch.Reducer.AVG:
            self._totals[name] = amount * weight if held is None else held + amount * weight
        elif held is None:
            self._totals[name] = amount
        elif reducer is pytorch.Reducer.SUM:
            self._totals[name] = held + amount
        else:
            choose = np.maximum if reducer is pytorch.Reducer.MAX else np.minimum  # both propagate NaN
            self._totals[name] = float(choose(held, amount))

    def totals(self) -> MetricTotals:
        """Move all totals to the host, with one copy and synchronisation per device."""
        return self.async_totals().wait()

    def async_totals(self) -> AsyncTotals:
        """Start copying all totals to the host; call ``wait`` before adding metrics."""
        return AsyncTotals(self._totals, self._weight, dict(self._losses))

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
        self._weight = 0.0
        self._num_calls = 0
        self._batches = []
        self._newest_losses = self._losses_now()
        self._losses = {}

    def newest_is_finite(self) -> bool | None:
        """Return whether any loss's newest value is finite; None if no loss is known.

        If nothing was added since ``reset``, the last losses before ``reset`` are used. The call synchronises the device.
        """
        newest = self._losses_now()
        return any(math.isfinite(float(loss)) for loss in newest) if newest else None

    def _losses_now(self) -> list[torch.Tensor | float]:
        newest = [losses[-1] for losses in self._losses.values() if losses]
        return newest or self._newest_losses

    def state_dict(self) -> dict[str, Any]:
        """Return the totals since the last report, for a checkpoint."""
        totals = {
            name: held.clone() if isinstance(held, torch.Tensor) else held
            for name, held in self._totals.items()
        }
        return {
            "totals": totals,
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


def merge_windows(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge several ranks' ``MetricWindow.state_dict``; all metrics must be means."""
    totals: dict[str, Any] = {}
    filled = [state for state in states if state["num_calls"]]
    for state in filled:
        for name, held in state["totals"].items():
            if name not in totals:
                totals[name] = held
            elif held is None or totals[name] is None:
                totals[name] = None
            else:
                totals[name] = totals[name] + held
    return {
        "totals": totals,
        "weight": sum(float(state["weight"]) for state in filled),
        "num_calls": max((int(state["num_calls"]) for state in filled), default=0),
        "batches": [],
    }


def rescale_window(state: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return a ``MetricWindow.state_dict`` with totals and weight times ``factor``.

    If the number of replicas changes at a resume, ranks add metrics more or less often per batch. ``factor`` gives the saved
    batches the same weight in the next report as later batches.
    """
    totals = {name: None if held is None else held * factor for name, held in state["totals"].items()}
    return {**state, "totals": totals, "weight": float(state["weight"]) * factor}


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
            weight = sum(share.weights[name] for _, share in reporting)
            combined[name] = sum(numbers) / weight if weight else None
        elif reducer is pytorch.Reducer.SUM:
            combined[name] = sum(numbers)
        else:
            combined[name] = float(np.max(numbers) if reducer is pytorch.Reducer.MAX else np.min(numbers))
    return combined
