"""A recorded grid of measurements, which answers for configurations of its space in place of a machine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.parallel_dims import ParallelDims
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.space import Space

_BENCHMARKED = 2  # trials of a search that report what their machine can do, too


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One configuration: metrics of each repeat, the median of their samples/s, bytes alive on one rank."""

    candidate: Candidate
    repeats: tuple[Mapping[str, float], ...]
    throughput: float
    peak_bytes: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        return cls(
            Candidate.from_json(fields["candidate"]),
            tuple(fields["repeats"]),
            float(fields["throughput"]),
            float(fields["peak_bytes"]),
        )


class RecordedGrid:
    """Every row of a file, of which those above the byte cap are out of memory."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.header = dict(document["header"])
        self.cap_bytes = float(self.header["cap_bytes"])
        self.rows = [Row.from_json(fields) for fields in document["rows"]]
        self.space = Space(
            self.header["base"],
            ParallelDims(int(self.header["ranks"])),
            stages=self.header["stages"],
            extra=self.header["extra"],
        )
        self._groups = ConfigGroups(self.space)
        self._by_identity = {self._groups.identity(row.candidate): row for row in self.rows}

    @classmethod
    def read(cls, path: Path) -> RecordedGrid:
        return cls(json.loads(path.read_text(encoding="utf-8")))

    @property
    def best(self) -> Row:
        """The row within the cap with the highest median."""
        return max(
            (row for row in self.rows if row.peak_bytes <= self.cap_bytes), key=lambda row: row.throughput
        )

    def row(self, candidate: Candidate) -> Row:
        """Return the row of a configuration; of one that was not recorded, that with the nearest values.

        Raises:
            KeyError: nothing of its stage was recorded with its micro batch.
        """
        identity = self._groups.identity(candidate)
        if identity not in self._by_identity:
            identity = self._groups.identity(self._snapped(candidate))
        return self._by_identity[identity]

    def _snapped(self, candidate: Candidate) -> Candidate:
        """Sizes by their ratio: one above the model's is the same to DeepSpeed as the largest that was recorded."""
        config = self.space.base if candidate.is_own else self.space.config(candidate)
        effective = check_deepspeed(config, self.space.sizes, auto="warning").effective
        settings = []
        for knob in self.space.knobs(candidate.stage):
            value: Any = effective
            for part in knob.path.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is None:
                value = candidate.stage == 3 if knob.path.endswith("overlap_comm") else knob.values[0]
            settings.append(
                (knob.path, min(knob.values, key=lambda known, value=value: _apart(known, value)))
            )
        return dataclasses.replace(candidate, settings=tuple(sorted(settings)), is_own=False)

    def ground(self, seed: int) -> GridGround:
        return GridGround(self, seed)


def _apart(known: Any, value: Any) -> float:
    if isinstance(known, (bool, str)) or isinstance(value, (bool, str)):
        return float(known != value)
    return abs(math.log((known + 1) / (value + 1)))


class GridGround:
    """Answers with the recorded repeats in turn, the first of them chosen by the seed."""

    def __init__(self, grid: RecordedGrid, seed: int) -> None:
        self._grid, self._seed = grid, seed
        self._count: dict[Candidate, int] = {}
        self._num_told = 0

    def outcome(self, candidate: Candidate) -> Outcome:
        """Return one repeat of a configuration, or that it ran out of memory."""
        row = self._grid.row(candidate)
        if row.peak_bytes > self._grid.cap_bytes:
            message = f"the cap of {self._grid.cap_bytes:.0f} bytes is exceeded"
            return Failure(FailureKind.DEVICE_OOM, message, "backward", None, int(self._grid.cap_bytes))
        count = self._count[candidate] = self._count.get(candidate, self._seed) + 1
        repeat = row.repeats[count % len(row.repeats)]
        memory = {"peak_memory_bytes": row.peak_bytes, "device_memory_bytes": self._grid.cap_bytes}
        self._num_told += 1
        machine = self._grid.header.get("machine", {}) if self._num_told <= _BENCHMARKED else {}
        return Measured({**repeat, **memory, **machine})

    def throughput(self, candidate: Candidate) -> float | None:
        """Return the median of a configuration; None where it is out of memory."""
        row = self._grid.row(candidate)
        return None if row.peak_bytes > self._grid.cap_bytes else row.throughput
