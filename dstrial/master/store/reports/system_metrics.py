"""System metrics among a trial's reports, and what series are in them.

System metrics are reports which belong to no batch. Determined's profiler reports five groups, each as ``{agent: {metric:
number}}`` or, of a device or a disk, ``{agent: {label: {metric: number}}}`` (Determined 0.38.1 ``core/_profiler.py``).
"""

from __future__ import annotations

import dataclasses
import math
import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

from dstrial.master.store.reports.metric_values import as_number

GROUPS = ("gpu", "cpu", "memory", "disk", "network")
"""Groups of Determined's profiler."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Series:
    """What tells one series of system metrics from another.

    Attributes:
        name: of the metric.
        agent_id: where it was measured.
        gpu_uuid: of which device; empty for what is of the whole node.
    """

    name: str
    agent_id: str
    gpu_uuid: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """Which series somebody wants; an empty text stands for all."""

    name: str = ""
    agent_id: str = ""
    gpu_uuid: str = ""

    def fit(self, series: Series) -> bool:
        """Say whether a series is wanted."""
        pairs = (
            (self.name, series.name),
            (self.agent_id, series.agent_id),
            (self.gpu_uuid, series.gpu_uuid),
        )
        return all(wanted in ("", found) for wanted, found in pairs)


def readings(group: str, metrics: Mapping[str, Any]) -> Iterator[tuple[Series, float]]:
    """Yield the series of a report and their numbers; pure.

    Numbers of a disk are left out: no label of the protocol says which disk. The reports of the group have them.
    """
    for agent_id, of_agent in metrics.items():
        if not isinstance(of_agent, Mapping):
            continue
        for name, value in of_agent.items():
            if isinstance(value, Mapping):
                if group == "gpu":
                    for inner, number in _numbers(value):
                        yield Series(inner, agent_id, name), number
            else:
                yield from ((Series(inner, agent_id), number) for inner, number in _numbers({name: value}))


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        number = as_number(value)
        if number is not None and math.isfinite(number):
            yield name, number


def report_ids(connection: sqlite3.Connection, trial_id: int, after_id: int) -> list[int]:
    """Return the ids of a trial's reports of system metrics, in order.

    They are those behind one of them, 0 for all.
    """
    marks = ", ".join("?" * len(GROUPS))
    rows = connection.execute(
        f"SELECT id FROM metrics WHERE trial_id = ? AND group_name IN ({marks}) AND steps < 0 AND id > ? "  # noqa: S608 - marks only
        "ORDER BY id",
        (trial_id, *GROUPS, after_id),
    )
    return [int(row["id"]) for row in rows]
