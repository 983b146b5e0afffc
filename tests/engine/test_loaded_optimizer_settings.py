"""Optimizer settings of a checkpoint under a scheduler that the trial created."""

import pytest

from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.ranks


def settings_under_a_scheduler(path):
    """Return the differing settings without override, and the error with override."""
    import deepspeed
    import torch

    from dstrial.engine.state import differing_settings, load_engine, optimizer_settings, save_engine
    from dstrial.errors import CheckpointError
    from dstrial.ranks.process_group import without_compiled_collectives

    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed("gloo")

    def make_engine(lr):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)[
            0
        ]

    save_engine(make_engine(0.5), path, "model0")
    engine = make_engine(0.25)
    before = optimizer_settings(engine)
    load_engine(engine, path, "model0")
    found = differing_settings(engine, before, overrides=False)
    try:
        differing_settings(engine, before, overrides=True)
    except CheckpointError as error:
        return found, str(error)
    return found, ""


def test_override_under_code_scheduler_is_refused(tmp_path):
    (result,) = run_function(settings_under_a_scheduler, 1, str(tmp_path))

    found, refusal = result.value
    assert found == ["initial_lr 0.25, in the checkpoint 0.5"]
    assert "the lr belongs to the ExponentialLR of the trial's code" in refusal
