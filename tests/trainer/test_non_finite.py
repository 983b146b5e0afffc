"""Runs with non-finite losses or weights, or without optimizer steps."""

import copy
import importlib
import json
import pathlib

import pytest
import torch
from deepspeed_release import needs_0_19_8
from in_process_fits import EXP_CONF, fit, trial_class
from small_runs import complete_steps, deepspeed_config, experiment, train

from dstrial import Batch
from dstrial.errors import ConfigError, NonFiniteError

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]


def fit_nan(name, exp_conf=EXP_CONF, data=None, stage=0, sections=None, **arguments):
    """Train a trial of ``poisoned_trials``: by default 12 batches, a report every 2."""
    trial = getattr(importlib.import_module("poisoned_trials"), name)
    hparams = {"deepspeed_config": deepspeed_config(stage, **(sections or {}))}
    for key in ("nan_from", "nan_until"):
        if key in arguments:
            hparams[key] = arguments.pop(key)
    conf = copy.deepcopy(exp_conf)
    if data is not None:
        conf["data"] = {"dstrial": data}
    arguments.setdefault("max_length", Batch(12))
    arguments.setdefault("reporting_period", Batch(2))
    arguments.setdefault("checkpoint_policy", "none")
    return fit(trial, hparams, conf, **arguments)


def runs():
    return [record.parent for record in pathlib.Path("runs").glob("*/*/run.json")]


def steps_saved():
    (run,) = runs()
    return complete_steps(run)


def reported():
    (run,) = runs()
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["steps_completed"] for row in rows if row["group"] == "training"]


def test_three_non_finite_reports_fail_run():
    with pytest.raises(NonFiniteError, match=r"loss.*since batch 5.*3 reports in a row") as caught:
        fit_nan("OnlyReported", nan_from=3)
    # The report at batch 4 includes the finite loss of batch 3; the reports at 6, 8 and 10 have none.
    assert reported() == [2, 4, 6, 8, 10]
    assert "non_finite" in str(caught.value)
    (run,) = runs()
    assert json.loads((run / "run.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_warn_and_ignore_modes_train_on(mode, caplog):
    done = fit_nan("OnlyReported", data={"non_finite": mode}, nan_from=2)
    assert done.result.is_complete
    assert done.checkpoints() == [12]
    assert ("no finite loss" in caplog.text) == (mode == "warn")
    assert caplog.text.count("no finite loss") <= 1


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_non_finite_weights_are_never_saved(stage, caplog):
    storage = {"save_trial_latest": 1, "save_trial_best": 0, "save_experiment_best": 0}
    conf = {**EXP_CONF, "checkpoint_storage": storage}
    with pytest.raises(NonFiniteError, match="since batch 5"):
        fit_nan("Poisoned", conf, nan_from=4, stage=stage, checkpoint_period=Batch(1))
    assert steps_saved() == [4]
    assert caplog.text.count("is not saved") == 1


def test_non_finite_final_weights_fail_run():
    with pytest.raises(NonFiniteError, match="weights"):
        fit_nan("Poisoned", nan_from=11, checkpoint_period=Batch(10))
    assert steps_saved() == [10]


def test_missing_engine_step_is_named():
    def train_batch(self, iterator, epoch_idx, batch_idx):
        features, targets = self.context.to_device(next(iterator))
        loss = torch.nn.functional.mse_loss(self.model_engine(features), targets)
        self.model_engine.backward(loss)
        return {"loss": loss}

    with pytest.raises(NonFiniteError, match=r"no optimizer step.*Call engine\.step\(\)") as raised:
        fit(trial_class(train_batch=train_batch), reporting_period=Batch(1))
    assert "learning rate" not in str(raised.value)


@needs_0_19_8  # DeepSpeed 0.19.0 does not check bfloat16 gradients, so it skips no step
def test_three_reports_without_optimizer_step_fail_run(caplog):
    # By default, bfloat16 with ZeRO 1 checks gradients (check_grad_overflow) and skips steps.
    with pytest.raises(NonFiniteError, match=r"no optimizer step.*since batch 5.*3 reports in a row"):
        fit_nan("Skipping", stage=1, sections={"bf16": {"enabled": True}}, nan_from=4)
    assert reported() == [2, 4, 6, 8, 10]


@needs_0_19_8  # DeepSpeed 0.19.0 does not check bfloat16 gradients, so it skips no step
def test_skipped_steps_are_counted_in_ignore_mode(caplog):
    done = fit_nan(
        "Skipping",
        stage=1,
        sections={"bf16": {"enabled": True}},
        nan_from=4,
        nan_until=7,
        data={"non_finite": "ignore"},
    )
    assert done.result.is_complete
    assert done.result.skipped_steps == 3
    assert "3 of 12 optimizer steps were skipped" in caplog.text
    status = json.loads((done.directory.path / "status.json").read_text())
    assert (status["optimizer_steps"], status["skipped_steps"]) == (12, 3)


def test_invalid_non_finite_mode_is_rejected():
    with pytest.raises(ConfigError, match=r"data\.dstrial\.non_finite is \"never\"; expected .*fail"):
        fit_nan("OnlyReported", data={"non_finite": "never"})


def test_finite_loss_on_any_rank_suffices(tmp_path):
    given = experiment({"deepspeed_config": deepspeed_config(1)}, batches=16, report=3)
    done = train(tmp_path, "OnlyReportedOnRank1", given, ranks=2, module="poisoned_trials")

    assert done.returncode == 0, done.output
