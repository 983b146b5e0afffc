"""Reports of a search: ``report.json``, ``report.md`` and a live table."""
