"""Write a report as JSON, and as a page without scripts or network."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from dstrial.dsat.core.outcome import TrialResult
from dstrial.dsat.report import views
from dstrial.dsat.report.document import SearchFacts, report_document
from dstrial.dsat.report.views import Document
from dstrial.dsat.space.space import Space
from dstrial.local.json_files import write_json_atomically

REPORT_NAMES = ("report.json", "report.html")
"""In the directory of a search."""


def write_report(
    directory: Path, facts: SearchFacts, space: Space, trials: Sequence[TrialResult]
) -> dict[str, Any]:
    """Write ``report.json`` and ``report.html``; return the former."""
    document = report_document(facts, space, trials)
    write_json_atomically(directory / REPORT_NAMES[0], document)
    beside = directory / f".{REPORT_NAMES[1]}.new"
    beside.write_text(render_page(document), encoding="utf-8")
    beside.replace(directory / REPORT_NAMES[1])
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
