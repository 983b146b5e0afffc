"""Problems, warnings and effective values of DeepSpeed configs."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.auto_values import AutoValues
from dstrial.config.command_line import CommandLine
from dstrial.config.deepspeed_rules.check import check_deepspeed, explain
from dstrial.config.deepspeed_rules.settings import deepspeed_rules
from dstrial.config.deepspeed_source import DeepSpeedSource
from dstrial.config.parallel_dims import ParallelDims

BASE = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}
ONE = ParallelDims(1)
RELEASE = "0.19.8"
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 6)
    | st.floats(-1, 2)
    | st.sampled_from(["auto", "cpu", "nvme", "fp16", ""]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "enabled", "stage"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def section_configs(section):
    """Return a strategy for a section's configs: valid keys, arbitrary values."""
    values = {}
    for key, rule in section.keys.items():
        values[key] = JSON_VALUES if rule.section is None else section_configs(rule.section) | JSON_VALUES
    return st.fixed_dictionaries({}, optional=values)


@given(section_configs(deepspeed_rules().root))
def test_check_deepspeed_never_raises_or_mutates_config(config):
    before = copy.deepcopy(config)
    result = check_deepspeed(config, ParallelDims(4, pp=2))

    assert config == before or str(config) == str(before)
    assert all(str(problem) for problem in result.problems)


def warnings(sizes=ONE, **keys):
    result = check_deepspeed({**BASE, **keys}, sizes, installed=RELEASE)
    assert result.problems == ()
    return result.warnings


@pytest.mark.parametrize(
    ("section", "name", "parameters"),
    [
        ("scheduler", "WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 0.01}),
        ("scheduler", "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}),
        ("scheduler", "LRRangeTest", {"lr_range_test_step_rate": 1.0}),
        ("scheduler", "StepLR", {"step_size": 2, "gamma": 0.5}),
        ("scheduler", "ExponentialLR", {"gamma": 0.9}),
        ("scheduler", "CosineAnnealingLR", {"T_max": 9, "eta_min": 1e-5}),
        ("optimizer", "Lamb", {"lr": 0.1, "max_coeff": 10.0, "min_coeff": 0.01}),
        ("optimizer", "RMSprop", {"lr": 0.1, "alpha": 0.99}),
        ("optimizer", "SGD", {"lr": 0.1, "dampening": 0.5}),
    ],
)
def test_float_parameter_without_own_rule_is_accepted(section, name, parameters):
    warnings(**{section: {"type": name, "params": parameters}})


@pytest.mark.parametrize(
    ("key", "expected", "fix"),
    [
        ("gamma", "a value", "Write the value itself, or remove the key"),
        ("step_size", "a value, which StepLR requires", "Write the value itself."),
    ],
)
def test_auto_of_required_parameter_does_not_suggest_removal(key, expected, fix):
    parameters = {"step_size": 2, "gamma": 0.5, key: "auto"}
    result = check_deepspeed({**BASE, "scheduler": {"type": "StepLR", "params": parameters}}, ONE)

    assert [str(problem).partition("expected ")[2] for problem in result.problems] == [
        f"{expected}. {fix}" + (" to take DeepSpeed's default." if "remove" in fix else "")
    ]


@pytest.mark.parametrize(
    ("keys", "fragment"),
    [
        ({"zero_optimization": {"allgather_partitions": True}}, "allgather_partitions is true, which no ZeRO stage reads"),
        ({"zero_optimization": {"stage": 2, "sub_group_size": 8}}, "sub_group_size is 8, which has no effect below stage 3"),
        ({"zero_optimization": {"stage": 3, "round_robin_gradients": True}}, "which has no effect in stage 3"),
        ({"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1e6}}, "is 1000000, which has no effect below stage 3"),
        (
            {"zero_optimization": {"stage": 3, "stage3_allgather_sequential": True, "stage3_prefetch_bucket_size": 9}},
            "which stage3_allgather_sequential sets to 1",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8}}, "which is cut down to the 1 ranks there are"),
        ({"zero_optimization": {"stage": "auto"}}, 'is "auto", which DeepSpeed 0.19.8 takes as its default (0)'),
        ({"zero_optimization": {"stage": "1"}}, 'zero_optimization.stage is "1"; write it without quotes'),
        ({"zero_optimization": {"cpu_offload": True, "stage": 2}}, "is deprecated in DeepSpeed 0.19.8; use offload_optimizer"),
        ({"zero_optimization": True}, 'is true, an old form; write {"stage": 1} instead'),
        ({"bfloat16": {"enabled": True}}, "bfloat16 is an old name; write bf16 instead"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "on top of bf16.enabled"),
        (
            {
                "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            "the offloaded optimizer runs in PyTorch",
        ),
        ({"compile": {"deepcompile": True}}, "which falls back to plain torch.compile in ZeRO stage 0"),
        ({"csv_monitor": {"enabled": True, "output_path": "logs"}}, 'output_path is "logs", below the working directory of'),
        ({"tensorboard": {"enabled": True}}, 'tensorboard.output_path is "", below the working directory of the ranks'),
        ({"checkpoint": {"load_universal": True}}, "which only your own calls of load_checkpoint read"),
        ({"dataloader_drop_last": True}, "which only DeepSpeed's own loader reads"),
        ({"gradient_accumulation_steps": "auto"}, 'gradient_accumulation_steps is "auto", solved to 1'),
    ],
)  # fmt: skip
def test_setting_without_effect_gives_warning(keys, fragment):
    assert any(fragment in warning for warning in warnings(**keys))


def test_underscore_keys_are_comments_where_deepspeed_ignores_them():
    comment = {"_comment": "as in the paper", "__note": {"a": 1}, "comment": "", "//": ""}

    assert warnings(**comment, activation_checkpointing=comment) == ()
    problem = check_deepspeed({**BASE, "zero_optimization": comment}, ONE, installed=RELEASE).problems[0]
    assert "zero_optimization._comment is not a key of zero_optimization" in str(problem)


@pytest.mark.parametrize(
    ("keys", "sizes", "total"),
    [
        # DeepSpeed counts the ranks of tensor_parallel as replicas, but not those of sequence_parallel.
        ({"tensor_parallel": {"autotp_size": 2}}, ParallelDims(4, tp=2), 16),
        ({"sequence_parallel_size": 2}, ParallelDims(4), 8),
        # If the trial passes process groups, DeepSpeed takes the replicas from them, not from the config.
        ({"sequence_parallel_size": 4}, ParallelDims(8, pp=2, is_pipeline=True), 16),
        ({"sequence_parallel_size": 4}, ParallelDims(4, is_pipeline=True), 16),
        ({"sequence_parallel_size": 4}, ParallelDims(8, tp=2), 16),
    ],
)
def test_replicas_are_counted_as_in_deepspeed(keys, sizes, total):
    result = check_deepspeed({**BASE, **keys}, sizes)

    assert result.batch.train_batch_size == total
    is_told = any("counts each record 2 times" in warning for warning in result.warnings)
    assert is_told is ("tensor_parallel" in keys)


def test_unknown_release_gives_warnings_instead_of_problems():
    result = check_deepspeed({**BASE, "new_feature": {"enabled": True}}, ONE, installed="0.20.1")

    assert result.problems == ()
    assert len(result.warnings) == 2
    assert "checked by the rules of DeepSpeed 0.19.8, but 0.20.1 is installed" in result.warnings[0]
    assert "new_feature is not a key of DeepSpeed 0.19.8" in result.warnings[1]


def test_runtime_problem_names_engine():
    result = check_deepspeed({**BASE, "zero_optimisation": {}}, ONE, "deepspeed config of engine 0")

    assert str(result.problems[0]).startswith("deepspeed config of engine 0: zero_optimisation is not a key")


def test_effective_config_has_given_solved_and_default_values():
    config = {**BASE, "zero_optimization": {"stage": 3}}
    effective = check_deepspeed(config, ParallelDims(2), installed=RELEASE).effective

    assert effective["train_batch_size"] == 8
    assert effective["gradient_accumulation_steps"] == 1
    assert effective["gradient_clipping"] == 1.0
    assert effective["zero_optimization"]["overlap_comm"] is True
    assert effective["optimizer"]["params"] == {"lr": 0.001}
    assert "scheduler" not in effective


def test_every_effective_config_value_has_origin():
    stage = ("zero_optimization", "stage")
    merged = {**BASE, "zero_optimization": {"stage": 2, "overlap_comm": "auto"}}
    source = DeepSpeedSource(
        None,
        "ds.json",
        merged,
        {("train_micro_batch_size_per_gpu",): "ds.json:2", ("zero_optimization",): "ds.json:5", stage: "exp.yaml:6"},
        frozenset({stage}),
    )  # fmt: skip
    rows = {
        row.key: (row.value, row.origin)
        for row in explain(source, check_deepspeed(merged, ONE, installed=RELEASE))
    }

    assert rows["train_batch_size"] == ("4", "solved")
    assert rows["train_micro_batch_size_per_gpu"] == ("4", "ds.json:2")
    assert rows["zero_optimization.stage"] == ("2", "overwrite_deepspeed_args (exp.yaml:6)")
    assert rows["zero_optimization.overlap_comm"] == ("false", 'DeepSpeed\'s default ("auto" in ds.json:5)')
    assert rows["gradient_clipping"] == ("1.0", "DeepSpeed's default")


@pytest.mark.parametrize(
    ("keys", "sizes", "is_told"),
    [
        ({"gradient_clipping": 0.5}, ParallelDims(4, pp=2), True),
        ({}, ParallelDims(4, pp=2), True),
        ({"gradient_clipping": 0.0}, ParallelDims(4, pp=2), False),
        ({"gradient_clipping": 0.5}, ParallelDims(4), False),
        ({"zero_optimization": {"stage": 1}}, ParallelDims(4, pp=2), False),
        ({"bf16": {"enabled": True}}, ParallelDims(4, pp=2), False),
    ],
)
def test_pipeline_clipping_by_first_stage_gives_warning(keys, sizes, is_told):
    assert ("gradients of its first stage alone" in " ".join(warnings(sizes, **keys))) is is_told


@pytest.mark.parametrize("is_trainer", [True, False], ids=["Trainer", "Accelerate"])
def test_sequence_parallelism_with_hf_libraries_is_rejected(is_trainer):
    filler = AutoValues("the library", is_trainer, CommandLine(()))
    result = check_deepspeed({**BASE, "sequence_parallel_size": 2}, ParallelDims(4), filler=filler)
    assert any(
        "sequence_parallel_size is 2; expected 1 with the library" in str(one) for one in result.problems
    )
