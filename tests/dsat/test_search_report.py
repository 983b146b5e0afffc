"""The report of a search: its JSON and its Markdown."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from surfaces import facts_of_search, play, space, surface, trials_of

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import (
    HIGHEST_EXPECTED,
    LOWEST_EXPECTED,
    Failure,
    FailureKind,
    Measured,
    Outcome,
    TrialResult,
)
from dstrial.dsat.report import report_document, write_report


def _outcome(candidate: Candidate) -> Outcome:
    """Return the formula's outcome plus the other metrics of a real measurement."""
    found = surface(candidate)
    if isinstance(found, Failure):
        return found
    peak = 10e9 + 1.1e9 * candidate.batch.micro_batch_size + 1e9 * candidate.stage
    more = {
        "end_to_end_throughput": 0.5 * found.metrics["throughput"],
        "half_width": 0.01,
        LOWEST_EXPECTED: 5.0,
        HIGHEST_EXPECTED: 6.0,
    }
    return Measured({**found.metrics, **more, "peak_memory_bytes": peak})


def _played(outcome_of: Callable[[Candidate], Outcome] = _outcome, max_trials: int = 16) -> list[TrialResult]:
    searched = space()
    played = play("asha", searched, outcome_of=outcome_of, max_trials=max_trials)
    return trials_of(played, searched, seconds=60.0)


def _document(**changes: Any) -> dict[str, Any]:
    return report_document(facts_of_search(**changes), space(), _played())


def test_report_names_best_and_own() -> None:
    document = _document()

    assert json.loads(json.dumps(document)) == document
    values = {row["trial_id"]: row["value"] for row in document["trials"] if row["value"] is not None}
    best, own = document["best"], document["own"]
    assert values[best] == max(values.values())
    assert document["gain"] == pytest.approx(values[best] / values[own] - 1)
    assert document["best_config"]["train_batch_size"] == 256
    assert all(row.get("failure") for row in document["trials"] if row["trial_id"] not in values)


def test_pareto_trials_are_not_dominated() -> None:
    document = _document()
    rows = {row["trial_id"]: row for row in document["trials"]}

    for trial_id in document["pareto"]:
        mine = rows[trial_id]
        assert not [
            row
            for row in rows.values()
            if row["throughput"]
            and row["memory_bytes"] < mine["memory_bytes"]
            and row["throughput"] > mine["throughput"]
        ]
    assert document["best"] in document["pareto"]


def test_sensitivity_compares_best_of_each_value() -> None:
    document = _document()
    (stages,) = [one for one in document["sensitivity"] if one["knob"] == "ZeRO stage"]
    rows = [row for row in document["trials"] if row["value"] is not None]
    top = max(row["value"] for row in rows)

    for level in stages["values"]:
        best = max(row["value"] for row in rows if row["stage"] == level["value"])
        assert level["loss"] == pytest.approx(1 - best / top)


def test_markdown_shows_gain_failures_and_rates(tmp_path: Path) -> None:
    trials = _played()
    again = dataclasses.replace(trials[0], trial_id=99)
    document = write_report(tmp_path, facts_of_search(), space(), [*trials, again])

    assert (document["num_trials"], len(document["trials"])) == (len(trials) + 1, len(trials))
    page = (tmp_path / "report.md").read_text()
    assert "gpt &lt;1>" in page
    # Every row of a table has as many cells as its header.
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    assert f"{document['gain']:+.1%} over your own" in page
    assert "device out of memory" in page
    assert page.count("; mean of 2 measurements |") == 1
    assert re.search(
        r"end to end \(all steps, with the data loader\), [\d.]+ k? ?by the median step, expect 5 to 6 in training",
        page,
    )
    assert json.loads((tmp_path / "report.json").read_text()) == document


def test_report_without_measurements_is_written(tmp_path: Path) -> None:
    trials = _played(lambda _candidate: Failure(FailureKind.DEVICE_OOM, "out of memory"))
    document = write_report(tmp_path, facts_of_search(reason="nothing fits"), space(), trials)

    assert document["best"] is None
    page = (tmp_path / "report.md").read_text()
    assert "Nothing could be measured." in page
    assert "nothing fits" in page


@pytest.mark.parametrize(("half_width", "is_certain"), [(0.001, True), (0.5, False)])
def test_gain_within_intervals_is_uncertain(half_width: float, is_certain: bool, tmp_path: Path) -> None:
    def wide(candidate: Candidate) -> Outcome:
        found = _outcome(candidate)
        return Measured({**found.metrics, "half_width": half_width}) if isinstance(found, Measured) else found

    document = write_report(tmp_path, facts_of_search(), space(), _played(wide))

    assert document["is_gain_certain"] is is_certain
    assert ("the gain is not certain" in (tmp_path / "report.md").read_text()) is not is_certain
