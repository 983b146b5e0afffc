"""Experiments of dsat searches, found by their labels, and their reports."""

from __future__ import annotations

import dataclasses
import sqlite3

from dstrial.master.store.database import fetch_all

_LABELLED = """
SELECT e.id, e.name, e.description, e.state, u.username, j.value AS label, e.start_us, e.end_us, e.end_reason, e.searcher_metric,
    e.smaller_is_better, e.slots_per_trial, e.notes
FROM experiments e JOIN users u ON u.id = e.owner_id, json_each(e.labels) j
WHERE e.labels LIKE '%"dsat-%' AND j.value LIKE ? ORDER BY e.id
"""


@dataclasses.dataclass(frozen=True, slots=True)
class LabelledExperiment:
    """An experiment with its dsat label, which names the search and a trial or worker."""

    id: int
    name: str
    description: str
    state: str
    username: str
    label: str
    start_us: int
    end_us: int | None
    end_reason: str | None
    searcher_metric: str
    smaller_is_better: bool
    slots_per_trial: int
    notes: str


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    experiment_id: int
    trial_id: int
    group_name: str
    steps: int
    metrics: str  # JSON


def labelled(connection: sqlite3.Connection, search_id: str = "") -> list[LabelledExperiment]:
    """Return the experiments of one dsat search, or of all searches, by id."""
    return fetch_all(LabelledExperiment, connection, _LABELLED, (f"dsat-{search_id}%",))


def measurements(connection: sqlite3.Connection, search_id: str, limit: int) -> list[Measurement]:
    """Return the reports of a search's trials and workers, by experiment."""
    return fetch_all(
        Measurement,
        connection,
        "SELECT t.experiment_id, m.trial_id, m.group_name, m.steps, m.metrics FROM experiments e, json_each(e.labels) j "
        "CROSS JOIN trials t ON t.experiment_id = e.id CROSS JOIN metrics m ON m.trial_id = t.id "
        "WHERE e.labels LIKE '%\"dsat-%' AND j.value LIKE ? AND m.group_name IN ('validation', 'dsat') AND m.archived = 0 "
        "ORDER BY t.experiment_id, m.id LIMIT ?",
        (f"dsat-{search_id}-%", limit),
    )
