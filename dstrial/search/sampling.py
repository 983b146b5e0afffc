"""Choose a trial's hyperparameters: a random sample, or a point of a grid.

Random numbers come from MT19937 (NumPy's legacy ``RandomState``), the generator of Determined's searchers.
"""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dstrial.config.experiment_config.hyperparameters import is_specification
from dstrial.errors import SearchError

_Route = tuple[str, ...]  # names of the mappings that contain a hyperparameter, and its own name
_MAX_TRIAL_SEED = 2**31  # exclusive


class SearchRandom:
    """The random generator of a search; its seed is from 0 to 2^32 - 1."""

    def __init__(self, seed: int) -> None:
        # Imported here: a master starts 20% faster without numpy.
        import numpy as np

        self._state = np.random.RandomState(seed)

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> SearchRandom:
        import numpy as np

        random = cls(0)
        key = np.array(snapshot["key"], dtype=np.uint32)
        random._state.set_state(("MT19937", key, int(snapshot["position"]), 0, 0.0))
        return random

    def snapshot(self) -> dict[str, Any]:
        state: Any = self._state.get_state(legacy=True)
        return {"key": [int(word) for word in state[1]], "position": int(state[2])}

    def integer_below(self, bound: int) -> int:
        """Return a random integer from 0 to ``bound - 1``.

        If ``bound`` is 1, the generator's state does not change.
        """
        # Rejection sampling with the smallest bit mask that covers the bound.
        highest = bound - 1
        if highest <= 0:
            return 0
        mask = (1 << highest.bit_length()) - 1
        num_words = (highest.bit_length() + 31) // 32
        while True:
            drawn = int.from_bytes(self._state.bytes(4 * num_words), "little") & mask
            if drawn <= highest:
                return drawn

    def uniform(self, low: float, high: float) -> float:
        """Return a random float in ``[low, high)`` with 53 random bits."""
        return low + (high - low) * float(self._state.random_sample())

    def request_id(self) -> str:
        return str(uuid.UUID(bytes=self._state.bytes(16), version=4))

    def trial_seed(self) -> int:
        return self.integer_below(_MAX_TRIAL_SEED)


def sample(hyperparameters: Mapping[str, Any], random: SearchRandom, route: _Route = ()) -> dict[str, Any]:
    """Return name -> value: a random value for each hyperparameter, or its constant.

    Values are drawn in alphabetical order of the names. For a nested mapping, ``route`` has the names of the mappings that
    contain it, outermost first.
    """
    values: dict[str, Any] = {}
    for name in sorted(hyperparameters):
        spec = hyperparameters[name]
        inner = (*route, name)
        if not isinstance(spec, Mapping):
            values[name] = spec
        elif is_specification(spec, inner):
            values[name] = _sample_one(spec, random)
        else:
            values[name] = sample(spec, random, inner)
    return {name: values[name] for name in hyperparameters}


def _sample_one(spec: Mapping[str, Any], random: SearchRandom) -> Any:
    kind = spec["type"]
    if kind == "const":
        return spec["val"]
    if kind == "categorical":
        return spec["vals"][random.integer_below(len(spec["vals"]))]
    if kind == "int":
        return spec["minval"] + random.integer_below(spec["maxval"] - spec["minval"] + 1)
    drawn = random.uniform(spec["minval"], spec["maxval"])
    return _exponential(spec, drawn) if kind == "log" else drawn


def _exponential(spec: Mapping[str, Any], exponent: float) -> float:
    try:
        return float(float(spec["base"]) ** exponent)
    except OverflowError as error:
        raise SearchError(
            f"a hyperparameter of type log is {spec['base']} to the power of {exponent}; expected a number below "
            "1.8e308. Lower its maxval, which is an exponent."
        ) from error


class Grid:
    """The points of a hyperparameter grid; ``point(idx)`` returns name -> value.

    Indices are from 0 to ``num_points - 1``. The alphabetically first hyperparameter varies slowest. Values of type ``int``
    are rounded half away from zero.

    Source: Determined 0.38.1, grid searcher.
    """

    def __init__(self, hyperparameters: Mapping[str, Any]) -> None:
        self._axes = list(_axes(hyperparameters, ()))
        self.num_points = math.prod(axis.num_points for axis in self._axes)

    def point(self, point_idx: int) -> dict[str, Any]:
        values: list[Any] = []
        for axis in reversed(self._axes):
            point_idx, position = divmod(point_idx, axis.num_points)
            values.append(axis.value(position))
        point: dict[str, Any] = {}
        for axis, value in zip(self._axes, reversed(values), strict=True):
            at = point
            for key in axis.route[:-1]:
                at = at.setdefault(key, {})
            at[axis.route[-1]] = value
        return point


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    route: _Route
    num_points: int
    value: Callable[[int], Any]


def _axes(hyperparameters: Mapping[str, Any], route: _Route) -> Iterator[_Axis]:
    for name in sorted(hyperparameters):
        spec = hyperparameters[name]
        inner = (*route, name)
        if not isinstance(spec, Mapping):
            yield _listed(inner, [spec])
        elif is_specification(spec, inner):
            yield _axis(inner, spec)
        elif not spec:
            yield _listed(inner, [{}])
        else:
            yield from _axes(spec, inner)


def _listed(route: _Route, values: Sequence[Any]) -> _Axis:
    return _Axis(route, len(values), values.__getitem__)


def _axis(route: _Route, spec: Mapping[str, Any]) -> _Axis:
    kind = spec["type"]
    if kind == "const":
        return _listed(route, [spec["val"]])
    if kind == "categorical":
        return _listed(route, spec["vals"])
    low, high, count = spec["minval"], spec["maxval"], spec["count"]
    if kind == "int":
        count = min(count, high - low + 1)

    def value(position_idx: int) -> Any:
        position = (low + high) / 2 if count == 1 else low + position_idx * (high - low) / (count - 1)
        if kind == "int":
            return _round_half_away(position)
        return _exponential(spec, position) if kind == "log" else position

    return _Axis(route, count, value)


def _round_half_away(value: float) -> int:
    return int(math.copysign(math.floor(abs(value) + 0.5), value))
