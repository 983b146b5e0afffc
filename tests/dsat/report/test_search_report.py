"""The report of a search: its JSON, its Markdown and the live table."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from surfaces import facts_of_search, play, space, surface, trials_of

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import Failure, FailureKind, Measured, Outcome, TrialResult
from dstrial.dsat.methods.base import ReportFacts
from dstrial.dsat.report import formatting
from dstrial.dsat.report.document import report_document
from dstrial.dsat.report.live import LiveProgress
from dstrial.dsat.report.markdown import write_report

_PHASES = {"forward": 0.3, "backward": 0.6, "step": 0.05}


def _outcome(candidate: Candidate) -> Outcome:
    """Return the formula's outcome plus the other metrics of a real measurement."""
    found = surface(candidate)
    if isinstance(found, Failure):
        return found
    step_us = found.metrics["latency"]
    more = {name: share * step_us for name, share in _PHASES.items()}
    peak = 10e9 + 1.1e9 * candidate.batch.micro_batch_size + 1e9 * candidate.stage
    rate = found.metrics["throughput"]
    more |= {"end_to_end_throughput": 0.5 * rate}
    more |= {"FLOPS_per_gpu": 2e12 * rate, "hardware_FLOPS_per_gpu": 3e12 * rate}
    return Measured({**found.metrics, **more, "half_width": 0.01, "peak_memory_bytes": peak})


def _played(outcome_of: Callable[[Candidate], Outcome] = _outcome, max_trials: int = 16) -> list[TrialResult]:
    searched = space()
    played = play("asha", searched, outcome_of=outcome_of, max_trials=max_trials)
    return trials_of(played, searched, seconds=60.0)


def _document(**changes: Any) -> dict[str, Any]:
    return report_document(facts_of_search(**changes), space(), _played())


def test_report_names_best_own_and_runners_up() -> None:
    document = _document()

    assert json.loads(json.dumps(document)) == document
    values = {row["trial_id"]: row["value"] for row in document["trials"] if row["value"] is not None}
    best, own = document["best"], document["own"]
    assert values[best] == max(values.values())
    assert document["gain"] == pytest.approx(values[best] / values[own] - 1)
    others = sorted((value for trial_id, value in values.items() if trial_id != best), reverse=True)
    assert [values[trial_id] for trial_id in document["runners_up"]] == others[:3]
    assert document["best_config"]["train_batch_size"] == 256
    assert sum(one["count"] for one in document["failures"]) == len(document["trials"]) - len(values)


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


def test_step_shares_sum_to_step_time() -> None:
    parts = {
        "compute": 0.04,
        "overhead": 0.01,
        "transfer": 0.02,
        "calls": 0.0,
        "optimizer": 0.005,
        "host_optimizer": 0.0,
        "host_copies": 0.0,
    }
    trials = _played()
    forecasts = {trial.trial_id: {"median_s": 1.0, "parts": {}} for trial in trials}
    forecasts[1]["is_guess"] = True
    predicted = ReportFacts(forecasts, {trial.trial_id: parts for trial in trials})
    document = report_document(facts_of_search(predicted=predicted), space(), trials)

    rows = {row["trial_id"]: row for row in document["trials"]}
    assert [rows[trial_id]["predicted"]["step_s"] for trial_id in (1, 2)] == [None, 1.0]

    assert {one["trial_id"] for one in document["step_time"]} == {document["own"], document["best"]}
    for one in document["step_time"]:
        for kind in ("measured", "explained"):
            assert sum(one[kind].values()) == pytest.approx(one["step_s"])
        assert one["explained"]["compute"] == pytest.approx(0.05)
        assert one["explained"]["idle"] == pytest.approx(one["step_s"] - 0.075)


def test_sensitivity_compares_best_of_each_value() -> None:
    document = _document()
    (stages,) = [one for one in document["sensitivity"] if one["knob"] == "ZeRO stage"]
    rows = [row for row in document["trials"] if row["value"] is not None]
    top = max(row["value"] for row in rows)

    for level in stages["values"]:
        best = max(row["value"] for row in rows if row["stage"] == level["value"])
        assert level["loss"] == pytest.approx(1 - best / top)


def test_predicted_needs_of_failed_own_are_reported(
    tmp_path: Path,
) -> None:
    def too_large(candidate: Candidate) -> Outcome:
        found = _outcome(candidate)
        return Failure(FailureKind.DEVICE_OOM, "out of memory") if candidate.is_own else found

    margins = [
        {"trial_id": 1, "micro_batch_size": 4, "missing_bytes": 11 * 2**30, "phase": "backward"},
        {"trial_id": 99, "micro_batch_size": 4, "missing_bytes": 1, "phase": "step"},
    ]

    write_report(
        tmp_path, facts_of_search(predicted=ReportFacts(margins=margins)), space(), _played(too_large)
    )

    sentence = "your own configuration needs 11 GiB more for micro batch 4, at the peak of its backward phase"
    assert f"{sentence} (tried: out of memory)" in (tmp_path / "report.md").read_text()


def test_markdown_shows_gain_failures_and_rates(tmp_path: Path) -> None:
    trials = _played()
    again = dataclasses.replace(trials[0], trial_id=99, why="measured again")
    document = write_report(tmp_path, facts_of_search(), space(), [*trials, again])

    best = next(row for row in document["trials"] if row["trial_id"] == document["best"])
    page = (tmp_path / "report.md").read_text()
    assert "gpt &lt;1>" in page
    # Every row of a table has as many cells as its header.
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1
    assert f"{document['gain']:+.1%} over your own" in page
    assert "device out of memory" in page
    assert "measured again" in page.partition("## Repeated measurements")[2]
    assert "measured again" not in page.partition("## All trials")[2].partition("## Repeated")[0]
    assert re.search(r"end to end \(all steps, with the data loader\), [\d.]+ k? ?by the median step", page)
    flops = [formatting.amount(factor * best["throughput"]) for factor in (2e12, 3e12)]
    assert f"{flops[0]} of the model, {flops[1]} with recomputation" in page
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


def test_terminal_shows_lines_progress_and_best() -> None:
    trials = _played(max_trials=4)
    console = Console(file=io.StringIO(), force_terminal=True, width=200)

    with LiveProgress("throughput", 10, console) as progress:
        progress.print_line("a line above")
        progress.show([*trials[:3], TrialResult(4, trials[3].candidate, "the fourth", "")])

    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "a line above" in shown
    assert "3/10" in re.sub(r"\x1b\[[\d;]*m", "", shown).replace(" ", "")
    assert "best so far" in shown
