"""Checks of ``data.dstrial.loggers``: names, options, secrets and packages."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dstrial.config.diagnostics import Diagnostics
from dstrial.config.experiment_config.loggers import (
    LOGGERS,
    LoggerSpec,
    check_loggers,
    is_installed,
    logger_specs,
)
from dstrial.errors import ConfigError


def config(given: Any, **more: Any) -> dict[str, Any]:
    return {"data": {"dstrial": {"loggers": given, **more}}}


def problems(given: Any, installed: Any = lambda _: True) -> list[str]:
    findings = Diagnostics({}, "exp.yaml")
    check_loggers(config(given), findings, installs_itself=False, has_package=installed)
    return list(map(str, findings.problems))


def test_logger_names_and_options_are_read() -> None:
    given = [
        "wandb",
        {"mlflow": {"experiment_name": "digits", "tags": {"team": "vision"}}},
    ]
    assert logger_specs(config(given)) == (
        LoggerSpec("wandb"),
        LoggerSpec("mlflow", {"experiment_name": "digits", "tags": {"team": "vision"}}),
    )
    assert problems(given) == []
    assert logger_specs({}) == logger_specs(None) == logger_specs(config(None)) == ()


def test_all_logger_problems_are_reported_together() -> None:
    found = problems(
        [
            "wand",
            "tensorboard",
            {"mlflow": {"experiment": "digits", "tracking_uri": 3, "tags": ["a"]}},
            {"wandb": {"mode": "on", "tags": "a", "project": ""}},
            "wandb",
            {"mlflow": [1]},
            7,
            {"a": 1, "b": 2},
        ]
    )
    expected = [
        'data.dstrial.loggers[0] is "wand"; expected one of wandb, mlflow. Write wandb instead.',
        "TensorBoard's files are written by every run.",
        "data.dstrial.loggers[2].mlflow.experiment is not a key of data.dstrial.loggers[2].mlflow",
        "Write experiment_name instead.",
        "data.dstrial.loggers[2].mlflow.tracking_uri is 3; expected a string.",
        'data.dstrial.loggers[2].mlflow.tags is ["a"]; expected a mapping.',
        'data.dstrial.loggers[3].wandb.mode is "on"; expected one of "online", "offline".',
        'data.dstrial.loggers[3].wandb.tags is "a"; expected a list.',
        'data.dstrial.loggers[3].wandb.project is ""; expected a text.',
        "data.dstrial.loggers[4] is wandb again; expected each logger once.",
        "data.dstrial.loggers[5].mlflow is [1]; expected a mapping of options.",
        "data.dstrial.loggers[6] is 7; expected a logger's name",
        'data.dstrial.loggers[7] is {"a": 1, "b": 2}; expected a logger\'s name',
    ]
    for part in expected:
        assert any(part in problem for problem in found), (part, found)
    assert len(found) == 12


@pytest.mark.parametrize("given", ["wandb", 3, {"wandb": {}}, True])
def test_loggers_must_be_list(given: Any) -> None:
    (problem,) = problems(given)
    assert "expected a list with wandb, mlflow" in problem
    with pytest.raises(ConfigError, match="expected a list"):
        logger_specs(config(given))


def test_secret_option_is_rejected_without_echoing_value() -> None:
    (problem,) = problems([{"wandb": {"api_key": "hidden"}}])
    assert "data.dstrial.loggers[0].wandb.api_key is not a key" in problem
    assert "hidden" not in problem


def test_missing_package_is_problem_unless_trial_installs_it() -> None:
    (problem,) = problems(["wandb", "mlflow"], lambda name: name == "mlflow")
    assert "wandb, which is not installed; expected a logger whose package is there" in problem
    assert "Run: pip install 'DSTRIAL_CHECKOUT_OR_WHEEL[wandb]'" in problem
    findings = Diagnostics({}, "exp.yaml")
    check_loggers(config(["wandb"]), findings, installs_itself=True, has_package=lambda _: False)
    assert findings.problems == []
    assert findings.notes == [
        "exp.yaml: data.dstrial.loggers names wandb, which is not installed here; the trial has to install it"
    ]


def test_is_installed_ignores_plain_directory_without_importing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    package = tmp_path / "elsewhere" / "mlflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "elsewhere")])
    assert not is_installed("wandb")
    assert is_installed("mlflow")
    assert "mlflow" not in sys.modules


def test_every_logger_has_package_extra() -> None:
    from importlib.metadata import metadata

    assert set(LOGGERS) <= set(metadata("dstrial").get_all("Provides-Extra") or ())
