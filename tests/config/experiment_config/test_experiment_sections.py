"""Experiment configs: defaults, overrides, lengths, sizes, entrypoints."""

import pytest
from bad_configs import DEEPSPEED, EXPERIMENT

from dstrial.config.dotted_keys import value_at
from dstrial.config.schema import Length
from dstrial.errors import ConfigError

NO_WORD = r"entrypoint is .*; expected module:Class, or a command\. Name what is to run"
KEY = "  deepspeed_config: ds.json\n"


def with_hyperparameters(lines):
    """Return the experiment YAML with more lines in the hyperparameters section."""
    return EXPERIMENT.replace(KEY, KEY + lines)


def test_defaults_match_determined_except_name_and_seed(load):
    config = load(EXPERIMENT.replace("name: test\n", ""))

    assert config.name == "exp"
    assert config.raw["reproducibility"]["experiment_seed"] == 0
    assert (config.raw["scheduling_unit"], config.raw["checkpoint_policy"]) == (100, "best")
    assert (config.max_restarts, config.preemption_timeout_s) == (5, 600)
    assert (config.slots_per_trial, config.smaller_is_better) == (1, True)
    assert config.raw["min_validation_period"] == config.raw["min_checkpoint_period"] == {"batches": 0}
    assert config.raw["profiling"] == {
        "enabled": False,
        "begin_on_batch": 0,
        "end_after_batch": None,
        "sync_timings": True,
    }


def test_const_hyperparameters_are_unwrapped_except_in_raw_config(load):
    lines = "  lr: {type: const, val: 1e-5}\n  net:\n    width: 8\n    sizes: [1, 2]\n"
    config = load(with_hyperparameters(lines))

    assert config.hyperparameters == {
        "deepspeed_config": "ds.json",
        "lr": 1e-5,
        "net": {"width": 8, "sizes": [1, 2]},
    }
    assert config.raw["hyperparameters"]["lr"] == {"type": "const", "val": 1e-5}
    assert config.raw["hyperparameters"]["net"]["width"] == {"type": "const", "val": 8}


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        ("{type: int, minval: 2, maxval: 5}", 2, 5),
        ("{type: double, minval: -1.0, maxval: 1.0}", -1.0, 1.0),
        ("{type: log, minval: -5, maxval: -1, base: 10}", 1e-5, 1e-1),
        ("{type: categorical, vals: [3, 4]}", 3, 4),
    ],
)
def test_search_space_sample_is_in_range_and_deterministic(load, spec, low, high):
    text = with_hyperparameters(f"  lr: {spec}\n")
    first, second = (load(text, require_concrete=False) for _ in range(2))

    assert low <= first.hyperparameters["lr"] <= high
    assert first.hyperparameters == second.hyperparameters
    assert "exp.yaml:5: hyperparameters.lr is a search space" in first.warnings[0]


def test_override_makes_search_space_concrete(load):
    text = with_hyperparameters("  lr: {type: int, minval: 1, maxval: 4}\n")
    config = load(text, overrides=["hyperparameters.lr=3", "searcher.max_length.batches=20", "labels=a,b"])

    assert config.hyperparameters["lr"] == 3
    assert config.raw["searcher"]["max_length"] == {"batches": 20}
    assert config.raw["labels"] == ["a", "b"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "hyperparameters.lrr=4",
            r"--config: hyperparameters\.lrr is no key of .*; expected one of .*lr.*\. "
            r"Write hyperparameters\.lr, or add it with --config \+hyperparameters\.lrr=VALUE\.",
        ),
        ("hyperparameters.net.widht=4", r"Write hyperparameters\.net\.width, or add it"),
        (
            "data.pth=/data",
            r"data\.pth is no key of .*; expected one of path, dstrial\. Write data\.path, or",
        ),
        ("scheduling_unit=often", r"^--config: scheduling_unit is \"often\"; expected an integer"),
        ("max_restarts", r"--config is 'max_restarts'; expected key=value"),
        ("+searcher.max_length=3", r"given with \+; expected a key below hyperparameters or data"),
    ],
)
def test_wrong_override_is_rejected(load, override, message):
    with pytest.raises(ConfigError, match=message):
        load(_with_own_keys(), overrides=[override])


@pytest.mark.parametrize(
    "override",
    [
        "+hyperparameters.rl=4",
        "+hyperparameters.new.deep=4",
        "+data.pth=/data",
        "hyperparameters.lr={type: const, val: 4}",
        "hyperparameters.overwrite_deepspeed_args.steps_per_print=4",
        "data.dstrial.min_slots=1",
        "searcher.smaller_is_better=false",
        "resources.priority=4",
        "profiling.enabled=true",
    ],
)
def test_override_of_known_or_added_key_is_accepted(load, override):
    config = load(_with_own_keys(), overrides=[override])
    key = override.removeprefix("+").partition("=")[0]
    assert value_at(config.raw, key) is not None


def _with_own_keys():
    text = EXPERIMENT.replace("hyperparameters:\n", "hyperparameters:\n  lr: 1\n  net: {width: 3}\n")
    return text + "data: {path: /d, dstrial: {}}\n"


@pytest.mark.parametrize(
    ("lines", "is_length"),
    [
        ("  max_length: 100\n", True),
        ("  max_length: {records: 64}\n", True),
        ("  max_time: 3\n  time_metric: epochs\n", True),
        ("  max_time: 3\n  time_metric: seconds\n", False),
        ("", False),
    ],
)
def test_missing_max_length_error_names_alternatives(load, lines, is_length):
    config = load(EXPERIMENT.replace("  max_length: {batches: 10}\n", lines))

    if is_length:
        config.require_max_length()
    else:
        with pytest.raises(ConfigError, match=r"searcher\.max_length is not given.*max_time.*time_metric"):
            config.require_max_length()


def test_length_is_number_of_batches_or_mapping():
    found = [Length.from_config(value) for value in (100, {"epochs": 2}, {"records": 64})]
    assert found == [Length(100, "batches"), Length(2, "epochs"), Length(64, "records")]


def test_replicas_are_slots_divided_by_stages(load):
    config = load(EXPERIMENT + "data: {dstrial: {pipeline_stages: 2}}\nresources: {slots_per_trial: 4}\n")

    assert config.sizes.dp == 2
    assert config.deepspeed_check.batch.train_batch_size == 8
    assert config.notes == ()


PIPELINE_SOURCE = """\
from deepspeed.pipe import PipelineModule
def build():
    return PipelineModule([])
class Ordinary:
    net = 1
class MyTrial(Ordinary):
    net = staticmethod(build)
"""


def test_pipeline_assumes_fewest_stages_that_fit(load):
    # The batch sizes are consistent only for 2 replicas on 4 slots.
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    config = load(deepspeed=DEEPSPEED | sizes, source=PIPELINE_SOURCE, slots=4)

    assert (config.sizes.pp, config.sizes.dp) == (2, 2)
    assert config.notes[0].startswith("data.dstrial.pipeline_stages is not given: assumed 2")


def test_unrelated_pipeline_in_module_is_ignored(load):
    text = EXPERIMENT.replace("model_def:MyTrial", "model_def:Ordinary")
    assert load(text, source=PIPELINE_SOURCE, slots=2).sizes.dp == 2


def test_merged_overwrites_keep_line_numbers(load):
    overwrites = "  overwrite_deepspeed_args:\n    optimizer: null\n    zero_optimization:\n      stage: 5\n"
    text = with_hyperparameters(overwrites)

    with pytest.raises(ConfigError, match=r"exp\.yaml:8: zero_optimization\.stage is 5"):
        load(text)
    config = load(text.replace("stage: 5", "stage: 2"))
    assert config.deepspeed.merged == {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def test_inline_and_additional_engine_configs_are_checked(load, tmp_path):
    inline = "  deepspeed_config:\n    train_batch_size: 8\n    optimizer: {type: Adam}\n    fp16: {enabled: 1.5}\n"
    with pytest.raises(ConfigError, match=r"exp\.yaml:7: fp16\.enabled is 1\.5; expected true or false"):
        load(EXPERIMENT.replace(KEY, inline))

    (tmp_path / "critic.json").write_text('{"train_batch_size": 4,\n "gradient_cliping": 1.0}')
    told = r"critic\.json:2: gradient_cliping is not a key .* Write gradient_clip"
    with pytest.raises(ConfigError, match=told):
        load(with_hyperparameters("  critic_deepspeed_config: critic.json\n"))


def test_environment_variables_accept_list_and_device_mapping(load, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    listed = load(EXPERIMENT + "environment: {environment_variables: [A=1, B=x=y, A=2]}\n")
    by_device = load(EXPERIMENT + "environment: {environment_variables: {cpu: [A=1], cuda: [A=2]}}\n")

    assert listed.environment_variables == {"A": "2", "B": "x=y"}
    assert by_device.environment_variables == {"A": "1"}
    assert by_device.raw["environment"]["environment_variables"] == {
        "cpu": ["A=1"],
        "cuda": ["A=2"],
        "rocm": [],
    }


def test_entrypoint_is_optional_unless_required(load):
    text = EXPERIMENT.replace("entrypoint: model_def:MyTrial\n", "")

    assert load(text).entrypoint is None
    with pytest.raises(ConfigError, match="entrypoint is not given; expected module:Class, or a command"):
        load(text, require_entrypoint=True)


@pytest.mark.parametrize(
    ("entrypoint", "message"),
    [
        *((one, NO_WORD) for one in ("[]", "['']", "['', x]", "''", "' '")),
        ("python3 -m dstrial.launch --trial model_def:NoTrial", r"model_def\.py has no NoTrial"),
        ("[python3, -m, dstrial.launch, --trial=model_def:NoTrial]", r"model_def\.py has no NoTrial"),
    ],
)
def test_empty_entrypoint_or_missing_trial_is_rejected(load, entrypoint, message):
    with pytest.raises(ConfigError, match=message):
        load(EXPERIMENT.replace("model_def:MyTrial", entrypoint))


def test_indivisible_slots_error_names_slots_option(load):
    with pytest.raises(ConfigError, match=r"^--slots is 3; expected a multiple of 2, .* Use 2 or 4 slots\.$"):
        load(EXPERIMENT + "data: {dstrial: {pipeline_stages: 2}}\n", slots=3)
