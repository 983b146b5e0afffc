"""Configurations that a search measures, and the batch sizes that they may have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.config.dotted_keys import value_at
from dstrial.config.parallel_dims import AUTOTP_KEY

HYPERPARAMETERS = "hyperparameters."
"""Prefix of paths that name a hyperparameter of the trial; other paths name a key of DeepSpeed's JSON."""

_LARGEST_FREE_MICRO_BATCH = 4096  # records; limit of a search whose global batch size may change


@dataclasses.dataclass(frozen=True, slots=True)
class BatchSplit:
    """The batch sizes of a configuration, in records, and its gradient accumulation."""

    micro_batch_size: int  # records of one forward pass of one replica
    accumulation: int  # forward passes of one replica in one optimizer step
    train_batch_size: int  # records of one optimizer step over all replicas


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration to measure: ZeRO stage, changed settings and batch sizes."""

    stage: int
    settings: tuple[tuple[str, Any], ...]  # (dotted path, value), sorted; empty if ``is_own``
    batch: BatchSplit
    is_own: bool = False  # the user's own configuration, without changes

    def overwrite(self) -> dict[str, Any]:
        """Return the changes to the user's DeepSpeed config, as nested dictionaries.

        If ``is_own`` is true, they are only the batch sizes.
        """
        result: dict[str, Any] = {
            "train_batch_size": self.batch.train_batch_size,
            "train_micro_batch_size_per_gpu": self.batch.micro_batch_size,
            "gradient_accumulation_steps": self.batch.accumulation,
        }
        if not self.is_own:
            set_path(result, "zero_optimization.stage", self.stage)
        for path, value in self.settings:
            if not path.startswith(HYPERPARAMETERS):
                set_path(result, path, value)
            if path == AUTOTP_KEY and value != 1:
                result["train_batch_size"] = None  # DeepSpeed counts each record once per rank of a layer
        return result

    def hyperparameters(self) -> dict[str, Any]:
        """Return the changed hyperparameters of the trial, as nested dictionaries."""
        result: dict[str, Any] = {}
        for path, value in self.settings:
            if path.startswith(HYPERPARAMETERS):
                set_path(result, path.removeprefix(HYPERPARAMETERS), value)
        return result

    def to_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "settings": dict(self.settings),
            "batch": dataclasses.asdict(self.batch),
            "is_own": self.is_own,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Candidate:
        return cls(
            int(fields["stage"]),
            tuple(sorted(fields["settings"].items())),
            BatchSplit(**fields["batch"]),
            bool(fields["is_own"]),
        )


def set_path(target: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path; create the nested dictionaries that are missing."""
    *above, last = path.split(".")
    for part in above:
        inner = target.get(part)
        if not isinstance(inner, dict):
            inner = target[part] = {}
        target = inner
    target[last] = value


def layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dictionary with two nested mappings merged.

    A value of ``above`` replaces that of ``below``, even with None.
    """
    result = dict(below)
    for key, value in above.items():
        known = result.get(key)
        if isinstance(value, Mapping):
            result[key] = layered(known if isinstance(known, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def changes_in_words(
    candidate: Candidate, effective: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> list[str]:
    """Return the settings that differ from the user's, as ``key=value`` texts.

    ``effective`` is the user's DeepSpeed config with defaults filled in; ``hyperparameters`` are those of the user's experiment.
    """
    words = []
    for path, value in candidate.settings:
        known = hyperparameters if path.startswith(HYPERPARAMETERS) else effective
        if value_at(known, path.removeprefix(HYPERPARAMETERS)) != value:
            words.append(
                f"{path.rpartition('.')[2] if '.device' not in path else path[18:]}={setting_text(value)}"
            )
    return words


def setting_text(value: Any) -> str:
    """Return a setting's value as a short text, such as ``on``, ``off`` or ``1e9``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (int, float)) and abs(value) >= 10_000:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return str(value)


class BatchSizeGrid:
    """The micro batch sizes that a search may try, in ascending order.

    A *position* is the index of a size, from 0. With a fixed ``train_batch_size``, the sizes are the divisors of
    ``train_batch_size / replicas``. If ``train_batch_size`` is None, every size up to 4096 is allowed. The global batch size is
    then the micro batch size times ``accumulation`` times ``replicas``.
    """

    def __init__(self, train_batch_size: int | None, replicas: int, accumulation: int) -> None:
        self.is_free = train_batch_size is None
        self._replicas, self._accumulation = replicas, accumulation
        total = train_batch_size or 0
        per_replica = total // replicas
        self._splits = [
            BatchSplit(micro, total // (micro * replicas), total)
            for micro in range(1, per_replica + 1)
            if per_replica % micro == 0
        ]

    @property
    def last(self) -> int:
        """Index of the largest micro batch size."""
        return _LARGEST_FREE_MICRO_BATCH - 1 if self.is_free else len(self._splits) - 1

    def split(self, position: int) -> BatchSplit:
        """Return the batch sizes whose micro batch size has the index ``position``."""
        if not self.is_free:
            return self._splits[position]
        micro = position + 1
        return BatchSplit(micro, self._accumulation, micro * self._accumulation * self._replicas)

    def position(self, micro_batch_size: float) -> int:
        """Return the index of the largest size up to ``micro_batch_size``; 0 if none."""
        if self.is_free:
            return max(0, min(int(micro_batch_size), _LARGEST_FREE_MICRO_BATCH) - 1)
        return max(sum(split.micro_batch_size <= micro_batch_size for split in self._splits) - 1, 0)
