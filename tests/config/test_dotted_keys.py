"""Dotted keys are read as nested keys, or the error shows the nested form."""

import pytest
from bad_configs import DEEPSPEED, EXPERIMENT

from dstrial.config.dotted_keys import nested
from dstrial.config.merge import merge_deepspeed, overwrite_deepspeed_config
from dstrial.errors import ConfigError

OVERWRITES = "  overwrite_deepspeed_args:\n"
KEY = "  deepspeed_config: ds.json\n"


def with_hyperparameters(lines):
    return EXPERIMENT.replace(KEY, KEY + lines)


def test_dotted_overwrite_is_read_as_nested(load):
    config = load(
        with_hyperparameters(OVERWRITES + "    zero_optimization.stage: 3\n    optimizer.params.lr: 0.5\n")
    )
    assert config.deepspeed.merged["zero_optimization"] == {"stage": 3}
    assert config.deepspeed.merged["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5}}
    assert config.deepspeed_check.effective["zero_optimization"]["stage"] == 3
    assert config.deepspeed.lines["zero_optimization", "stage"].endswith("exp.yaml:6")
    space = load(with_hyperparameters(OVERWRITES + "    zero_optimization.stage: {type: const, val: 2}\n"))
    assert space.deepspeed_check.effective["zero_optimization"]["stage"] == 2


def test_wrong_dotted_value_error_names_full_key(load):
    with pytest.raises(ConfigError, match=r"exp\.yaml:6: zero_optimization\.stage is 7"):
        load(with_hyperparameters(OVERWRITES + "    zero_optimization.stage: 7\n"))


def test_merge_functions_accept_dotted_keys():
    base = {"train_batch_size": 4, "zero_optimization": {"stage": 1, "overlap_comm": True}}
    assert overwrite_deepspeed_config(base, {"zero_optimization.stage": 2}) == {
        "train_batch_size": 4,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
    }
    assert merge_deepspeed(base, {"zero_optimization.stage": None})["zero_optimization"] == {
        "overlap_comm": True
    }
    assert merge_deepspeed(base, {"zero_optimization": {"offload_optimizer.device": "cpu"}})[
        "zero_optimization"
    ] == {"stage": 1, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}


def test_nested_keeps_unknown_dotted_names():
    assert nested({"my.own": 1, "zero_optimization": 3}) == {"my.own": 1, "zero_optimization": 3}


@pytest.mark.parametrize(
    ("hyperparameters", "deepspeed", "more", "shown"),
    [
        ("", {**DEEPSPEED, "zero_optimization.stage": 3}, "", "Write zero_optimization: {stage: 3} instead"),
        (
            "",
            {**DEEPSPEED, "zero_optimization": {"offload_param.device": "cpu"}},
            "",
            'Write offload_param: {device: "cpu"} instead',
        ),
        ("", DEEPSPEED, "resources.slots_per_trial: 2\n", "Write resources: {slots_per_trial: 2} instead"),
        (
            "  overwrite_deepspeed_args.zero_optimization.stage: 3\n",
            DEEPSPEED,
            "",
            "Write overwrite_deepspeed_args: {zero_optimization: {stage: 3}} instead",
        ),
    ],
)
def test_dotted_key_elsewhere_error_shows_nested_form(load, hyperparameters, deepspeed, more, shown):
    with pytest.raises(ConfigError) as caught:
        load(with_hyperparameters(hyperparameters), deepspeed, more=more)
    assert shown in str(caught.value)
    assert "Remove it" not in str(caught.value)
