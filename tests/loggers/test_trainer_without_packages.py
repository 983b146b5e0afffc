"""Trainer.fit with missing, disabled or unknown loggers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from in_process_fits import EXP_CONF, fit

from dstrial import Batch
from dstrial.config.experiment_config.loggers import is_installed
from dstrial.errors import ConfigError

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _temporary_runs_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSTRIAL_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)


def with_loggers(loggers: list[object]) -> dict[str, object]:
    return {**EXP_CONF, "data": {"dstrial": {"loggers": loggers}}}


@pytest.mark.skipif(is_installed("mlflow"), reason="Requires: [no mlflow]")
def test_training_continues_without_logger_package(caplog: pytest.LogCaptureFixture) -> None:
    outcome = fit(exp_conf=with_loggers(["mlflow"]), reporting_period=Batch(2))
    assert sorted(outcome.rows("training")) == [2, 4]
    said = [record.getMessage() for record in caplog.records if record.name == "dstrial.loggers"]
    assert said == [
        "logger mlflow: it cannot start: mlflow is not installed. Run: pip install 'DSTRIAL_CHECKOUT_OR_WHEEL[mlflow]'. "
        "No report of this run is stored there; training continues.",
        # Two training reports with telemetry each, and one validation report.
        "logger mlflow: 5 of 5 reports are lost",
    ]


def test_loggers_are_disabled_in_test_mode(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(exp_conf=with_loggers(["mlflow"]), test_mode=True)
    monkeypatch.setenv("DSTRIAL_TEST", "1")
    fit(exp_conf=with_loggers(["mlflow"]), max_length=Batch(1))
    assert [record for record in caplog.records if record.name == "dstrial.loggers"] == []


def test_unknown_logger_is_rejected_before_training(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ConfigError, match="expected one of wandb, mlflow"),
    ):
        fit(exp_conf=with_loggers(["wandbb"]))
    assert "report_training_metrics" not in caplog.text
