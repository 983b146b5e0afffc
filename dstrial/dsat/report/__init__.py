"""Reports: ``report.json``, from it ``report.md``, and a live table."""
