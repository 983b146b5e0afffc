"""Reports: ``report.json``, from it ``report.md`` and ``.html``, and a live table."""

from __future__ import annotations

from dstrial.dsat.report.document import SearchFacts, report_document
from dstrial.dsat.report.files import REPORT_NAMES, write_report

__all__ = ["REPORT_NAMES", "SearchFacts", "report_document", "write_report"]
