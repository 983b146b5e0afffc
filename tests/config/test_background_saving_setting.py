import pytest
from bad_configs import EXPERIMENT, BadConfig, write

from dstrial.config import load_experiment
from dstrial.errors import ConfigError


def load(tmp_path, value, key="background_saving"):
    experiment = EXPERIMENT + f"data: {{dstrial: {{{key}: {value}}}}}\n"
    return load_experiment(*write(BadConfig("none", (), None, experiment), tmp_path))


@pytest.mark.parametrize("value", ["true", "false"])
def test_saving_behind_the_loop_can_be_switched(tmp_path, value):
    assert load(tmp_path, value).raw["data"]["dstrial"]["background_saving"] is (value == "true")


def test_anything_else_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.dstrial\.background_saving is .*; expected true or false"):
        load(tmp_path, "sometimes")


@pytest.mark.parametrize("key", ["determined_imports", "override_optimizer"])
def test_other_switches_take_booleans_only(tmp_path, key):
    assert load(tmp_path, "false", key).raw["data"]["dstrial"][key] is False
    with pytest.raises(ConfigError, match=rf"data\.dstrial\.{key} is .*; expected true or false"):
        load(tmp_path, "sometimes", key)
