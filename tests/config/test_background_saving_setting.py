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


def test_whose_classes_determineds_names_give_can_be_switched(tmp_path):
    config = load(tmp_path, "false", "determined_imports")
    assert config.raw["data"]["dstrial"]["determined_imports"] is False
    with pytest.raises(ConfigError, match=r"data\.dstrial\.determined_imports is .*; expected true or false"):
        load(tmp_path, "sometimes", "determined_imports")
