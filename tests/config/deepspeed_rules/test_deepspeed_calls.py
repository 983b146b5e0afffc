"""What DeepSpeed 0.19 has made an error in old code, told by `dstrial check` from the source alone."""

import pytest
from bad_configs import DEEPSPEED, EXPERIMENT

from dstrial.errors import ConfigError

HEAD = "import deepspeed\nfrom attrdict import AttrDict\nfrom determined.pytorch.deepspeed import DeepSpeedTrial\n\n"
INIT = """
class MyTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        self.args = {args}
        engine, _, _, _ = deepspeed.initialize({call})
        self.model_engine = context.wrap_model_engine(engine)
"""


@pytest.fixture
def check(load):
    def check(source, entrypoint="model_def:MyTrial", deepspeed=None, experiment=EXPERIMENT):
        return load(experiment.replace("model_def:MyTrial", entrypoint), deepspeed, source=HEAD + source)

    return check


@pytest.mark.parametrize(
    ("args", "call"),
    [
        ("AttrDict(context.get_hparams())", "args=self.args, model=1, config={}"),
        ("AttrDict(self.context.get_hparams())", "self.args, model=1, config_params=self.config"),
        ("SimpleNamespace(**context.get_hparams())", "config={}, model=1, args=self.args"),
    ],
)
def test_two_configs_for_one_engine_are_a_problem_at_their_line(check, args, call):
    with pytest.raises(ConfigError) as caught:
        check(INIT.format(args=args, call=call))
    (problem,) = caught.value.problems
    assert "model_def.py:10: deepspeed.initialize() is given args whose deepspeed_config" in str(problem)
    assert "Leave args out of the call" in str(problem)


@pytest.mark.parametrize(
    ("args", "call"),
    [
        ("AttrDict(context.get_hparams())", "args=self.args, model=1"),
        ("AttrDict(context.get_hparams())", "model=1, config=self.args.deepspeed_config"),
        ("context.get_hparams()", "args=self.args, model=1, config={}"),  # a dict has no attributes
        ("parse()", "args=self.args, model=1, config={}"),
    ],
)
def test_one_config_is_none(check, args, call):
    assert check(INIT.format(args=args, call=call)).warnings == ()


def test_hyperparameters_without_a_deepspeed_config_are_no_second_one(check):
    source = INIT.format(args="AttrDict(context.get_hparams())", call="args=self.args, config={}")
    experiment = EXPERIMENT.replace("  deepspeed_config: ds.json\n", "  width: 3\n")
    assert check(source, experiment=experiment).hyperparameters == {"width": 3}


def test_a_script_and_its_command_line_are_read_too(check, tmp_path):
    (tmp_path / "train.py").write_text(
        "import argparse, deepspeed\n"
        "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\n"
        "args = parser.parse_args()\n"
        "engine, *_ = deepspeed.initialize(args=args, model=1, config={})\n"
    )
    command = "python3 -m determined.launch.deepspeed -- python3 train.py"
    assert check("MyTrial = 1\n", command).warnings == ()
    with pytest.raises(
        ConfigError, match=r"train\.py:4: deepspeed\.initialize\(\) is given args whose deepspeed_config"
    ):
        check("MyTrial = 1\n", f"{command} --deepspeed_config ds.json")


def test_what_a_script_imports_of_the_model_definition_is_read_too(check, tmp_path):
    (tmp_path / "train.py").write_text("from model_def import MyTrial\n")
    source = INIT.format(args="AttrDict(context.get_hparams())", call="args=self.args, model=1, config={}")
    with pytest.raises(ConfigError, match=r"model_def\.py:10: deepspeed\.initialize\(\)"):
        check(source, "python3 -m determined.launch.deepspeed python3 train.py")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_operators_that_cpus_lack_are_told(check, monkeypatch, device):
    monkeypatch.setenv("DS_ACCELERATOR", device)
    keys = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}

    warnings = check(INIT.format(args=1, call=""), deepspeed={**DEEPSPEED, **keys}).warnings

    expected = "zero_quantized_weights is true, for which DeepSpeed has no operator on CPUs: CPU ranks fail"
    assert [one.endswith(expected) for one in warnings] == ([True] if device == "cpu" else [])


@pytest.mark.parametrize(
    ("call", "sections"),
    [
        ("model=1, optimizer=self.optimizer, lr_scheduler=self.schedule", ["optimizer", "scheduler"]),
        ("model=1, optimizer=None, config={}", []),
        ("model=1, config={}", []),
    ],
)
def test_arguments_over_config_sections_are_a_warning(check, call, sections):
    deepspeed = {
        **DEEPSPEED,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    found = check(INIT.format(args="None", call=call), deepspeed=deepspeed)
    warnings = [text for text in found.warnings if "takes the place of" in text]
    assert [text.split(" of the ")[1].split()[0] for text in warnings] == sections
    assert all("model_def.py:10: deepspeed.initialize(" in text for text in warnings)


def test_arguments_without_a_config_section_are_no_warning(check):
    plain = {key: value for key, value in DEEPSPEED.items() if key not in ("optimizer", "scheduler")}
    found = check(INIT.format(args="None", call="optimizer=self.optimizer"), deepspeed=plain)
    assert not [text for text in found.warnings if "takes the place of" in text]
