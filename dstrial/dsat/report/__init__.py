"""Reports: ``report.json``, from it ``report.html``, and a live table."""
