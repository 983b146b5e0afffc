"""``report.html`` from a report's JSON: one file that needs no network and no script. Pure, but for reading its template."""

from __future__ import annotations

import functools
import json
from importlib import resources

import jinja2

from dstrial.dsat.report import views
from dstrial.dsat.report.views import Document


def render_page(document: Document) -> str:
    """Return the report as one HTML page; charts come as SVG whose texts are escaped already."""
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
