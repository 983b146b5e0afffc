"""A dotted key is an error that shows the nested form."""

import pytest
from bad_configs import DEEPSPEED, EXPERIMENT

from dstrial.errors import ConfigError

KEY = "  deepspeed_config: ds.json\n"


def with_hyperparameters(lines):
    return EXPERIMENT.replace(KEY, KEY + lines)


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
            "  overwrite_deepspeed_args: {zero_optimization.stage: 3}\n",
            DEEPSPEED,
            "",
            "Write zero_optimization: {stage: 3} instead",
        ),
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
