"""Write a report as JSON, Markdown and a page without scripts or network."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from dstrial.dsat.core.outcome import TrialResult
from dstrial.dsat.report import formatting, views
from dstrial.dsat.report.document import SearchFacts, report_document
from dstrial.dsat.report.views import Document
from dstrial.dsat.space.space import Space
from dstrial.local.json_files import write_json_atomically

REPORT_NAMES = ("report.json", "report.md", "report.html")
"""In the directory of a search."""


def render_markdown(document: Document) -> str:
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
        parts.append(f"## Where the time of a step goes: {whose}, {formatting.seconds(one['step_s'])}")
        for key in ("measured", "explained"):
            if one[key]:
                shares = [
                    (part, formatting.seconds(value), formatting.share(value / one["step_s"]))
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


def write_report(
    directory: Path, facts: SearchFacts, space: Space, trials: Sequence[TrialResult]
) -> dict[str, Any]:
    """Write ``report.json``, ``report.md`` and ``report.html``; return the first."""
    document = report_document(facts, space, trials)
    write_json_atomically(directory / REPORT_NAMES[0], document)
    texts = (render_markdown(document), render_page(document))
    for name, text in zip(REPORT_NAMES[1:], texts, strict=True):
        beside = directory / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(directory / name)
    return document


def render_page(document: Document) -> str:
    best = views.trial(document, document["best"])
    runners = [views.trial(document, trial_id) for trial_id in document["runners_up"]]
    return _template().render(
        document=document,
        headline=views.headline(document),
        facts=views.facts(document),
        best=best,
        best_config=json.dumps(document["best_config"], indent=2),
        columns=views.TRIAL_COLUMNS,
        runners=[views.trial_cells(document, row) for row in runners if row is not None],
        cells=[views.trial_cells(document, row) for row in views.ordered(document)],
        needs=views.needs(document),
        front=views.front_chart(document),
        predictions=views.prediction_charts(document),
        times=views.time_charts(document),
        sensitivity=views.sensitivity_rows(document),
    )


@functools.cache
def _template() -> jinja2.Template:
    text = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)
