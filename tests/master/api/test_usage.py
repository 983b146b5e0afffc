"""Usage reports of ``det resources``: allocated seconds and slots."""

from __future__ import annotations

import csv
import datetime
import json

import pytest
from det_here import DetHere
from serving import Master

pytestmark = pytest.mark.process

DAY_US = 24 * 3600 * 1_000_000
NOON_US = 20_000 * DAY_US + DAY_US // 2
"""2024-10-04T12:00:00Z."""
HOUR_US = DAY_US // 24


@pytest.fixture
def used(fresh_master: Master) -> Master:
    """Trial 1 used a slot for 3 h with a checkpoint, trial 2 two slots over midnight."""
    fresh_master.change("UPDATE experiments SET labels = ? WHERE id = 1", json.dumps(["a,b", "c"]))
    fresh_master.change(
        "UPDATE allocations SET state = 'TERMINATED', start_us = ?, end_us = ? WHERE trial_id = 1",
        NOON_US,
        NOON_US + 3 * HOUR_US,
    )
    fresh_master.change(
        "UPDATE allocations SET state = 'TERMINATED', slots = '[0, 1]', start_us = ?, end_us = ? WHERE trial_id = 2",
        NOON_US + 11 * HOUR_US,
        NOON_US + 13 * HOUR_US,
    )
    fresh_master.change("UPDATE checkpoints SET report_us = ? WHERE trial_id = 1", NOON_US + 2 * HOUR_US)
    for group, hours in (("training", 1), ("validation", 1.5)):
        fresh_master.change(
            "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (1, 1, ?, 1, ?, '{}')",
            group,
            int(NOON_US + hours * HOUR_US),
        )
    return fresh_master


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_raw_usage_lists_activities_with_times(det: DetHere, used: Master) -> None:
    rows = rows_of(det.ok("resources", "raw", "2024-10-04T00:00:00Z", "2024-10-05T00:00:00Z"))

    assert [
        (row["experiment_id"], row["kind"], row["slots"], float(row["seconds"]) / 3600) for row in rows
    ] == [
        ("1", "training", "1", 1.0),
        ("1", "validation", "1", 0.5),
        ("1", "checkpointing", "1", 0.5),
        ("1", "training", "1", 1.0),
        ("2", "training", "2", 1.0),
    ]
    assert (rows[0]["username"], rows[0]["labels"]) == ("determined", "a\\,b,c")
    assert rows[0]["start_time"] == "2024-10-04T12:00:00.000000Z"
    assert rows[4]["end_time"] == "2024-10-05T01:00:00.000000Z"
    found = json.loads(det.ok("resources", "raw", "2024-10-04T00:00:00Z", "2024-10-05T00:00:00Z", "--json"))
    assert [entry["seconds"] for entry in found["resourceEntries"]] == [float(row["seconds"]) for row in rows]


def test_raw_usage_includes_agent_row(det: DetHere, used: Master) -> None:
    today = datetime.datetime.now(datetime.timezone.utc)
    begin, end = (today + datetime.timedelta(days=days) for days in (-1, 1))
    rows = rows_of(det.ok("resources", "raw", *(f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in (begin, end))))
    assert [(row["kind"], row["username"], row["slots"]) for row in rows] == [
        ("agent", used.services.agent_id, str(len(used.services.slots)))
    ]


def test_aggregated_usage_sums_slot_seconds(det: DetHere, used: Master) -> None:
    rows = rows_of(det.ok("resources", "aggregated", "2024-10-03", "2024-10-05"))
    found = [
        (row["aggregation_type"], row["aggregation_key"], row["date"], float(row["seconds"]) / 3600)
        for row in rows
    ]

    assert found == [
        ("total", "total", "2024-10-03", 0.0),
        ("experiment_label", "a,b", "2024-10-04", 3.0),
        ("experiment_label", "c", "2024-10-04", 3.0),
        ("username", "determined", "2024-10-04", 5.0),
        ("resource_pool", "default", "2024-10-04", 5.0),
        ("total", "total", "2024-10-04", 5.0),
        ("username", "determined", "2024-10-05", 2.0),
        ("resource_pool", "default", "2024-10-05", 2.0),
        ("total", "total", "2024-10-05", 2.0),
    ]
    months = json.loads(det.ok("resources", "aggregated", "2024-09", "2024-10", "--monthly", "--json"))[
        "resourceEntries"
    ]
    assert [(one["periodStart"], one["seconds"] / 3600) for one in months] == [
        ("2024-09", 0.0),
        ("2024-10", 7.0),
    ]


def test_usage_allocations_include_workspace(det: DetHere, used: Master) -> None:
    rows = rows_of(det.ok("resources", "allocations", "2024-10-04T00:00:00Z", "2024-10-05T00:00:00Z"))
    assert [
        (row["allocation_id"], row["task_type"], row["workspace_name"], row["slots"]) for row in rows
    ] == [
        ("1.request.1", "TRIAL", "Uncategorized", "1"),
        ("2.request.1", "TRIAL", "Uncategorized", "2"),
    ]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("raw?timestamp_after=x&timestamp_before=2024-10-05T00:00:00Z", "timestampAfter is 'x'"),
        ("raw?timestamp_after=2024-10-06T00:00:00Z&timestamp_before=2024-10-05T00:00:00Z", "not before"),
        ("aggregated?start_date=x&end_date=2024-10-05", "startDate is 'x'"),
        ("aggregated?start_date=0001-01-01&end_date=2024-10-05", "at most 4000 periods"),
        ("allocations-csv", "timestampAfter is missing"),
    ],
)
def test_usage_rejects_invalid_times(served: Master, path: str, part: str) -> None:
    answer = served.get(f"/resources/allocation/{path}")
    assert (answer.status, part in answer.error) == (400, True), answer.error
