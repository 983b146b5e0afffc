"""Reports: ``report.json``, from it ``report.md`` and ``.html``, and a live table."""
