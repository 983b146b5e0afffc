"""Render the JSON report of a search as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.core.candidate import setting_text
from dstrial.dsat.core.outcome import TrialResult
from dstrial.dsat.report import formatting
from dstrial.dsat.report.document import SearchFacts, report_document
from dstrial.dsat.space.space import Space
from dstrial.file_writes import replace_file
from dstrial.local.json_files import write_json_atomically
from dstrial.visible_text import size_text

Document = Mapping[str, Any]

REPORT_NAMES = ("report.json", "report.md")
"""Names of the JSON and the Markdown report in the directory of a search."""
_COLUMNS = (
    "trial",
    "",
    "measured",
    "step",
    "memory",
    "predicted step",
    "configuration",
    "why it was measured",
)


def write_report(
    directory: Path, facts: SearchFacts, space: Space, trials: Sequence[TrialResult]
) -> dict[str, Any]:
    """Write ``report.json`` and ``report.md``; return the JSON document."""
    document = report_document(facts, space, trials)
    write_json_atomically(directory / REPORT_NAMES[0], document)
    replace_file(directory / REPORT_NAMES[1], "\n".join(lines(document)) + "\n", sync=False)
    return document


def lines(document: Document) -> Iterator[str]:
    """Yield the Markdown text of a report in pieces of one or more lines."""
    yield f"# DeepSpeed configuration of {_cell(document['name'])}"
    yield f"\n{headline(document)}\n"
    yield from _table(("", ""), facts(document))
    yield from (f"- {_cell(note)}" for note in document["notes"])
    best = _trial(document, document["best"])
    if best is not None:
        yield f"\n## The best: {_cell(best['description'])}\n\n```json"
        yield f"{json.dumps(document['best_config'], indent=2)}\n```"
    if document["needs"]:
        yield "\n## What more memory would allow\n"
        yield from (f"- {line}" for line in needs(document))
    if document["step_time"]:
        yield "\n## Where the time of a step goes\n"
        yield from _table(("", "", "step", "parts"), _step_times(document))
    if document["sensitivity"]:
        yield "\n## What each knob was worth\n"
        yield from _table(("knob", "up to", "value", "the best with it"), _sensitivity(document))
    runners = [_trial(document, trial_id) for trial_id in document["runners_up"]]
    if runners:
        yield "\n## Runners-up\n"
        yield from _table(_COLUMNS, [_trial_cells(document, row) for row in runners if row is not None])
    if document["failures"]:
        yield "\n## Failures\n"
        rows = [(one["kind"], str(one["count"]), one["example"]) for one in document["failures"]]
        yield from _table(("kind", "trials", "for example"), rows)
    yield "\n## All trials\n"
    ordered = _ordered(document)
    first = [row for row in ordered if row["first_trial_id"] == row["trial_id"]]
    yield from _table(_COLUMNS, [_trial_cells(document, row) for row in first])
    repeated = [row for row in ordered if row["first_trial_id"] != row["trial_id"]]
    if repeated:
        yield "\n## Repeated measurements\n"
        yield from _table(_COLUMNS, [_trial_cells(document, row) for row in repeated])
    if document["pareto"]:
        numbers = ", ".join(map(str, document["pareto"]))
        yield f"\nNo other configuration beats these trials in both throughput and memory: {numbers}."


def headline(document: Document) -> str:
    best, own = _trial(document, document["best"]), _trial(document, document["own"])
    if best is None:
        return "Nothing could be measured."
    value = f"{formatting.amount(best['value'])} {document['unit']}"
    if best["is_own"]:
        return (
            f"Your own configuration is the best: {value}. Nothing that was measured is better by more than "
            f"{formatting.share(document['tie'])}."
        )
    if document["gain"] is None:
        state = "was not measured" if own is None else f"ended with: {own['state']}"
        return f"The best configuration reaches {value}. Your own {state}."
    doubt = (
        "" if document["is_gain_certain"] else " Their intervals overlap, so that the gain is not certain."
    )
    return (
        f"The best configuration reaches {value}, {formatting.share(document['gain'], signed=True)} over your own "
        f"({formatting.amount(own['value'] if own else 0.0)} {document['unit']}).{doubt}"
    )


def facts(document: Document) -> list[tuple[str, str]]:
    state = "finished" if document["is_finished"] else "not finished"
    found = [
        ("search", f"{document['method']}, {state}: {document['reason']}"),
        ("trials", f"{len(document['trials'])}, with {document['num_slots']} rank(s) each"),
    ]
    spent = sum(row["seconds"] or 0.0 for row in document["trials"])
    if spent:
        found.append(("time in trials", formatting.format_duration(spent)))
    best, own = _trial(document, document["best"]), _trial(document, document["own"])
    for whose, row in (("the best", best), ("your own", None if own is best else own)):
        metrics = {} if row is None else row.get("metrics") or {}
        if told := formatting.rates(metrics):
            found.append((f"samples/s of {whose}", told))
        model, hardware = metrics.get("FLOPS_per_gpu"), metrics.get("hardware_FLOPS_per_gpu")
        if model and hardware:
            told = (
                f"{formatting.amount(model)} of the model, {formatting.amount(hardware)} with recomputation"
            )
            found.append((f"FLOP/s of {whose}, per device", told))
    model = document["model"]
    if "num_params" in model:
        found.append(("model", f"{formatting.amount(model['num_params'])} parameters"))
    if "activation_bytes_per_record" in model:
        found.append(("one record keeps", size_text(model["activation_bytes_per_record"])))
    if "device_memory_bytes" in model:
        found.append(("device memory", size_text(model["device_memory_bytes"])))
    return found


def needs(document: Document) -> list[str]:
    """Return sentences on the memory that larger micro batches would lack or leave."""
    found = []
    for one in document["needs"]:
        whose = "the best configuration" if one["trial_id"] == document["best"] else "your own configuration"
        size, missing = one["micro_batch_size"], one["missing_bytes"]
        tried = "" if one["was_tried"] is None else f" (tried: {one['was_tried']})"
        if missing > 0:
            phase = f", at the peak of its {one['phase']} phase" if one.get("phase") else ""
            found.append(f"{whose} needs {size_text(missing)} more for micro batch {size}{phase}{tried}")
        else:
            found.append(f"{whose} has {size_text(-missing)} to spare with micro batch {size}{tried}")
    return found


def _step_times(document: Document) -> Iterator[tuple[str, str, str, str]]:
    for one in document["step_time"]:
        whose = "the best" if one["trial_id"] == document["best"] else "yours"
        for title, key in (("measured", "measured"), ("predicted, idle is what is left", "explained")):
            parts = [
                f"{part} {formatting.seconds(value)} ({formatting.share(value / one['step_s'])})"
                for part, value in one[key].items()
                if value
            ]
            if parts:
                yield whose, title, formatting.seconds(one["step_s"]), ", ".join(parts)


def _sensitivity(document: Document) -> Iterator[tuple[str, str, str, str]]:
    for one in document["sensitivity"]:
        for row in one["values"]:
            loss = formatting.share(-row["loss"], signed=True) if row["loss"] > 0 else "best"
            told = f"{loss}, {row['count']} trial(s)"
            yield (
                formatting.knob(one["knob"]),
                formatting.share(one["effect"]),
                setting_text(row["value"]),
                told,
            )


def _trial(document: Document, trial_id: int | None) -> Mapping[str, Any] | None:
    return next((row for row in document["trials"] if row["trial_id"] == trial_id), None)


def _trial_cells(document: Document, row: Mapping[str, Any]) -> list[str]:
    value = row["state"]
    if row["value"] is not None:
        within = "" if row["half_width"] is None else f" ± {formatting.share(row['half_width'])}"
        value = f"{formatting.amount(row['value'])}{within}"
    predicted = row["predicted"] or {}
    foreseen = ""
    if predicted.get("step_s") and row["step_s"]:
        foreseen = formatting.share(predicted["step_s"] / row["step_s"] - 1, signed=True)
    marks = {document["best"]: "best", document["own"]: "yours"}
    return [
        str(row["trial_id"]),
        marks.get(row["trial_id"], ""),
        value,
        "" if row["step_s"] is None else formatting.seconds(row["step_s"]),
        "" if row["memory_bytes"] is None else size_text(row["memory_bytes"]),
        foreseen,
        row["description"],
        row["why"],
    ]


def _ordered(document: Document) -> list[Mapping[str, Any]]:
    sign = 1 if document["smaller_is_better"] else -1

    def rank(row: Mapping[str, Any]) -> tuple[bool, float, int]:
        return row["value"] is None, sign * (row["value"] or 0.0), row["trial_id"]

    return sorted(document["trials"], key=rank)


def _table(columns: Sequence[str], rows: Any) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
