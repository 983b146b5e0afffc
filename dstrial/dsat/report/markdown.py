"""``report.md`` from a report's JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from dstrial.dsat.report import numbers, views
from dstrial.dsat.report.views import Document


def render_markdown(document: Document) -> str:
    """Return the report as Markdown."""
    rows: list[Sequence[str]]
    parts = [f"# DeepSpeed configuration of {document['name']}", f"**{views.headline(document)}**"]
    parts.append(_table(("", ""), views.facts(document)))
    parts += [f"- {note}" for note in document["notes"]]
    best = views.trial(document, document["best"])
    if best is not None:
        parts += ["## The best configuration", best["description"]]
        parts.append("```json\n" + json.dumps(document["best_config"], indent=2) + "\n```")
        runners = [views.trial(document, trial_id) for trial_id in document["runners_up"]]
        rows = [views.trial_cells(document, row) for row in runners if row is not None]
        if rows:
            parts += ["## Runners-up", _table(views.TRIAL_COLUMNS, rows)]
    needs = views.needs(document)
    if needs:
        parts += ["## What more memory would allow", "\n".join(f"- {line}" for line in needs)]
    for one in document["step_time"]:
        whose = "best" if one["trial_id"] == document["best"] else "your own"
        parts.append(f"## Where the time of a step goes: {whose}, {numbers.seconds(one['step_s'])}")
        for key in ("measured", "explained"):
            if one[key]:
                shares = [
                    (part, numbers.seconds(value), numbers.share(value / one["step_s"]))
                    for part, value in one[key].items()
                ]
                parts.append(
                    _table(("as measured" if key == "measured" else "as predicted", "", "share"), shares)
                )
    rows = [
        (name, effect, "; ".join(f"{value}: {words}" for value, words, _ in values))
        for name, effect, values in views.sensitivity_rows(document)
    ]
    if rows:
        parts += ["## What each knob was worth", _table(("knob", "effect", "best with each value"), rows)]
    if document["failures"]:
        rows = [(one["kind"], str(one["count"]), one["example"]) for one in document["failures"]]
        parts += ["## Failures", _table(("kind", "trials", "for example"), rows)]
    cells = [views.trial_cells(document, row) for row in views.ordered(document)]
    parts += ["## All trials", _table(views.TRIAL_COLUMNS, cells)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
