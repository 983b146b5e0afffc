"""The three files of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.report.document import SearchFacts, report_document
from dstrial.dsat.report.markdown import render_markdown
from dstrial.dsat.report.page import render_page
from dstrial.dsat.results import TrialResult
from dstrial.dsat.space import Space
from dstrial.local.json_files import write_json_atomically

REPORT_NAMES = ("report.json", "report.md", "report.html")
"""In the directory of a search."""


def write_report(
    directory: Path, facts: SearchFacts, space: Space, trials: Sequence[TrialResult]
) -> dict[str, Any]:
    """Write ``report.json``, ``report.md`` and ``report.html``; returns the first.

    Args:
        directory: of the search.
        facts: about the search.
        space: what was searched.
        trials: every trial so far.

    Raises:
        OSError: the disk is full, for example.
    """
    document = report_document(facts, space, trials)
    write_json_atomically(directory / REPORT_NAMES[0], document)
    texts = (render_markdown(document), render_page(document))
    for name, text in zip(REPORT_NAMES[1:], texts, strict=True):
        beside = directory / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(directory / name)
    return document
