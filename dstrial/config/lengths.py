"""A length of training with its unit: how long to train, how often to validate or checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, cast

Unit = Literal["batches", "epochs", "records"]

UNITS: tuple[Unit, ...] = ("batches", "epochs", "records")


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    """A number of batches, epochs or records.

    Attributes:
        value: how many; 0 means "never" where a period is asked for.
        unit: what is counted; a batch is one optimizer step.
    """

    value: int
    unit: Unit

    @classmethod
    def from_config(cls, value: int | Mapping[str, Any]) -> Length:
        """Read the two forms of an experiment config: ``100`` (batches) and ``{epochs: 2}``.

        Args:
            value: an already validated value, as :func:`is_length` accepts it.
        """
        if isinstance(value, Mapping):
            ((unit, number),) = value.items()
            return cls(int(number), cast(Unit, unit))
        return cls(int(value), "batches")


def is_length(value: object, *, allow_integer: bool) -> bool:
    """Say whether a config value is a length: ``{batches|epochs|records: n}`` with n of at least 0.

    Args:
        value: whatever stands in the config.
        allow_integer: accept a bare integer too, meaning batches.
    """
    if isinstance(value, Mapping):
        if len(value) != 1:
            return False
        ((unit, number),) = value.items()
        return unit in UNITS and is_count(number)
    return allow_integer and is_count(value)


def is_count(value: object) -> bool:
    """Say whether a value is an integer of at least 0 (a bool is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
