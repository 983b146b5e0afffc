"""Optimizer settings that differ from a checkpoint's are named, and count where the run asks for it."""

import pytest
from small_runs import deepspeed_config, experiment, train

pytestmark = pytest.mark.ranks

SETTINGS = "lr 0.0001, in the checkpoint 0.01; weight_decay 0.5, in the checkpoint 0.25"


def with_optimizer(batches, overrides=False, **settings):
    config = deepspeed_config(1, gradient_accumulation_steps=1, train_batch_size=8)
    del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"], config["scheduler"]
    config["optimizer"]["params"] |= {"weight_decay": 0.25, **settings}
    fields = {"data": {"dstrial": {"override_optimizer": True}}} if overrides else {}
    return experiment(
        {"deepspeed_config": config, "num_records": 64}, batches, report=2, checkpoint=2, **fields
    )


@pytest.mark.parametrize(("overrides", "ranks"), [(False, 2), (True, 2), (True, 1)])
def test_changed_optimizer_settings_at_resume_are_named(tmp_path, overrides, ranks):
    begun = train(tmp_path / "begun", "DataParallelTrial", with_optimizer(2), ranks=2)
    assert begun.returncode == 0, begun.output
    changed = with_optimizer(4, overrides, lr=0.0001, weight_decay=0.5)
    resumed = train(tmp_path / "resumed", "DataParallelTrial", changed, ranks=ranks, run=begun)

    assert resumed.returncode == 0, resumed.output
    assert f"this run sets its optimizer to {SETTINGS}; " in resumed.output
    assert ("this run's settings count" if overrides else "the checkpoint counts") in resumed.output
    rates = [row["metrics"]["learning_rate"] for row in resumed.rows("telemetry")]
    assert rates[0] == 0.01
    assert rates[-1] == (0.0001 if overrides else 0.01)
