"""Reports of a search: ``report.json``, ``report.md`` and lines on a terminal."""
