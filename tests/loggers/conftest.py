"""Skip tests marked `loggers` unless all logger packages are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dstrial.config.experiment_config.loggers import LOGGERS, is_installed

TRAINER = Path(__file__).parent.parent / "trainer"
sys.path.insert(0, str(TRAINER))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in LOGGERS if not is_installed(name)]
    if missing:
        skipped = pytest.mark.skip(reason=f"Requires: [{', '.join(missing)}] (make test-loggers)")
        for item in items:
            if item.get_closest_marker("loggers"):
                item.add_marker(skipped)
