"""Each batch has a row of its own at W&B.

W&B takes no step below those that it has seen, and merges what has the same step.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dstrial.loggers.logger import Group, LoggedRun, Report
from dstrial.loggers.wandb_logger import WandbLogger


class Run:
    """What the logger uses of a run of W&B's; ``step`` is the next one that is free."""

    offline = False
    url = "https://wandb.example/run"

    def __init__(self, step: int) -> None:
        self.step = step
        self.rows: dict[int, dict[str, Any]] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        pass

    def log(self, row: dict[str, Any], step: int) -> None:
        assert step >= max(self.rows, default=self.step), "W&B drops it"
        self.rows.setdefault(step, {}).update(row)


def logged(
    monkeypatch: pytest.MonkeyPatch, directory: Path, step: int, reports: list[tuple[Group, int]]
) -> dict[int, dict[str, Any]]:
    """Log reports, of which each has its batch as ``loss``, to a run that begins at a step."""
    run = Run(step)
    package = types.SimpleNamespace(
        init=lambda **options: run,
        Settings=type("Settings", (), {"model_fields": {}}),
        errors=types.SimpleNamespace(Error=OSError),
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    logger = WandbLogger({"dir": str(directory), "mode": "offline"})
    logger.begin(LoggedRun("0" * 16, "run", "group", "project", {}, {}, directory, directory))
    logger.log([Report(group, batch, None, {"loss": batch}) for group, batch in reports])
    return run.rows


def test_a_step_is_the_batch_and_reports_of_one_batch_share_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = logged(
        monkeypatch, tmp_path, 0, [("validation", 0), ("training", 10), ("validation", 10), ("training", 20)]
    )
    assert rows == {
        0: {"batches": 0, "validation/loss": 0},
        10: {"batches": 10, "training/loss": 10, "validation/loss": 10},
        20: {"batches": 20, "training/loss": 20},
    }


def test_batches_that_are_trained_again_after_a_resume_have_a_row_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    again: list[tuple[Group, int]] = [
        ("training", 10),
        ("training", 20),
        ("validation", 20),
        ("training", 30),
        ("training", 40),
    ]
    rows = logged(monkeypatch, tmp_path, 31, again)
    assert {step: row["batches"] for step, row in rows.items()} == {31: 10, 32: 20, 33: 30, 40: 40}
    assert rows[32] == {"batches": 20, "training/loss": 20, "validation/loss": 20}
