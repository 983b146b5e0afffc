"""The search data on the master's page: labels, notes and report documents."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from surfaces import facts_of_search, play, space, surface, trials_of

from dstrial.dsat.backends import trial_spec
from dstrial.dsat.backends.cluster import notes_of
from dstrial.dsat.report import live_document, report_document
from dstrial.master.store.views.overviews import LabelledExperiment
from dstrial.master.web import searches


def experiment(number: int, label: str, **changes: object) -> LabelledExperiment:
    usual = LabelledExperiment(
        id=number,
        name="gpt (dsat trial 1)",
        description="dsat asha: zero 1, 4 x 8",
        state="COMPLETED",
        username="ann",
        label=label,
        start_us=1,
        end_us=2,
        end_reason=None,
        searcher_metric="throughput",
        smaller_is_better=False,
        slots_per_trial=8,
        notes="",
    )
    return dataclasses.replace(usual, **changes)  # type: ignore[arg-type]


def test_search_of_reads_dsat_labels_only() -> None:
    source = (
        Path(trial_spec.__file__).read_text() + Path(trial_spec.__file__).with_name("cluster.py").read_text()
    )
    labels = set(re.findall(r'label = f"(dsat-\{search_id\}-[^"]+)"', source))
    assert labels == {
        "dsat-{search_id}-{trial_id}",
        "dsat-{search_id}-search",
        "dsat-{search_id}-full",
    }
    for label in labels:
        assert searches.search_of(label.format(search_id="0a1b2c3d", trial_id=12)) == "0a1b2c3d"
    for label in ("dsat", "dsat-", "dsat-0a1b2c3d", "dsat-0a1b2c3d-mine", "dsat-xyz-1"):
        assert searches.search_of(label) is None


def test_document_of_notes_is_final_report() -> None:
    searched = space()
    played = play("asha", searched, outcome_of=surface, max_trials=16)
    trials = trials_of(played, searched, seconds=60.0)
    forecasts = {trials[0].trial_id: {"step_s": 0.1, "spread": 0.2, "memory_bytes": 1.0}}
    facts = facts_of_search(forecasts=forecasts)
    document = json.loads(json.dumps(report_document(facts, searched, trials)))
    notes = notes_of({"results": {"report.json": json.dumps(document)}})

    shown = searches.document_of(notes)

    assert shown is not None
    assert set(searches._FACTS) <= set(document)  # Each displayed fact is in the report.
    assert shown["best"] == document["best"]
    assert [row["trial_id"] for row in shown["trials"]] == [row["trial_id"] for row in document["trials"]]
    assert shown["trials"][0]["predicted"]["step_s"] == 0.1
    assert "best_config" not in shown  # A config may hold secrets.
    assert shown["pareto"] == document["pareto"]
    for broken in (
        "",
        "mine",
        notes[:-3],
        notes_of({}),
        notes_of({"results": {"report.json": "["}}),
    ):
        assert searches.document_of(broken) is None


def test_live_document_is_small_without_configs() -> None:
    searched = space()
    played = play("asha", searched, outcome_of=surface, max_trials=16)
    ended = trials_of(played, searched, handle={"attempt": 1, "experiment_id": 4})
    trials = [*ended[:-1], dataclasses.replace(ended[-1], outcome=None)]
    forecasts = {trials[-1].trial_id: {"step_s": 0.1}}
    facts = facts_of_search(reason="", is_finished=False, forecasts=forecasts, notes=("a note",))
    document = json.loads(json.dumps(live_document(report_document(facts, searched, trials))))
    notes = notes_of({"report": document})

    shown = searches.document_of(notes, is_live=True)

    assert searches.document_of(notes) is None  # It is not a final report.
    assert shown is not None
    assert set(searches._FACTS) <= set(document)
    assert (shown["is_finished"], shown["notes"]) == (False, document["notes"])
    assert [row["trial_id"] for row in shown["trials"]] == [one.trial_id for one in trials]
    assert [row["experiment"] for row in shown["trials"]] == [4] * len(trials)
    assert shown["trials"][-1]["state"] == "running"
    assert shown["trials"][-1]["predicted"]["step_s"] == 0.1
    assert shown["pareto"] == document["pareto"]
    for row in document["trials"]:
        assert "settings" not in row  # Settings may hold secrets, as configs do.
    assert "best_config" not in document
    # Of many trials, the document keeps the own, best and Pareto trials and the last 200.
    row = {**document["trials"][0], **dict.fromkeys(("predicted", "seconds", "why"))}
    many = [{**row, "trial_id": number} for number in range(1, 1001)]
    whole = {**document, "pareto": [3], "best": 2, "own": 1, "trials": many}
    numbers = [one["trial_id"] for one in live_document(whole)["trials"]]
    assert numbers == [1, 2, 3, *range(801, 1001)]


def report(**changes: object) -> dict[str, object]:
    facts = dict.fromkeys(searches._FACTS)
    return {**facts, "is_finished": False, "notes": [], "pareto": [], "trials": [], **changes}


def test_forged_notes_are_ignored() -> None:
    """Any user may label an experiment as part of a search and write its notes."""
    for label in (f"dsat-0a1b2c3d-{'9' * 30}", f"dsat-0a1b2c3d-{'1' * 5000}"):
        assert searches.search_of(label) is None
    deep = notes_of({}).rstrip("{}") + '{"report": ' + "[" * 100_000
    assert searches.document_of(deep, is_live=True) is None
    for wrong in (report(trials="text"), report(trials=[1], num_trials="many"), []):
        assert searches.document_of(notes_of({"report": wrong}), is_live=True) is None


def test_newest_document_is_chosen() -> None:
    def told(number: int, **changes: object) -> LabelledExperiment:
        notes = notes_of({"report": report(**changes)})
        return experiment(number, f"dsat-0a1b2c3d-{number}", notes=notes)

    rows = [{"trial_id": 1}]
    old = told(1, reason="interrupted by SIGINT", trials=rows, num_trials=300, told_s=10.0)
    new = told(2, reason="", trials=rows, num_trials=300, told_s=20.0)
    short = told(3, reason="short", trials=rows * 2, num_trials=200, told_s=30.0)
    for own in ([old, new, short], [short, new, old]):
        found = searches.newest_document(own)
        assert found is not None
        assert found["reason"] == ""
    assert searches.newest_document([experiment(4, "dsat-0a1b2c3d-4")]) is None
