"""The committed rules agree with what the installed DeepSpeed does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start
from bad_configs import BAD_CONFIGS
from deepspeed_release import needs_0_19_8

from dstrial.config.deepspeed_rules.check import check_deepspeed
from dstrial.config.deepspeed_rules.settings import TABLE
from dstrial.config.parallel_dims import ParallelDims

# The rules are those of 0.19.8. DeepSpeed compiles a Muon kernel when it is first used on a machine.
pytestmark = [needs_0_19_8, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
ADAM = {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}}
BASE = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM}

REFUSED = {
    **{bad.mistake: (bad.keys, bad.says) for bad in BAD_CONFIGS if bad.says not in ("", "accepted")},
    "auto batch size": (
        {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 4},
        "unsupported operand type",
    ),
    "gradient type in stage 0": (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "unsupported mix",
    ),
    "LAMB with a fixed loss scale": (
        {"optimizer": {"type": "Lamb", "params": {"lr": 0.001}}, "fp16": {"loss_scale": 8}},
        "requires dynamic loss scaling",
    ),
    "unknown optimizer parameter": (
        {"optimizer": {"type": "Adam", "params": {"learning_rate": 1.0, "torch_adam": True}}},
        "unexpected keyword argument",
    ),
    "unmanaged accumulation with overlap": (
        {"managed_gradient_accumulation": False, "zero_optimization": {"stage": 1, "overlap_comm": True}},
        "only with ZeRO stage 2",
    ),
}
"""Configs that DeepSpeed rejects when it is initialized, and part of its error."""

SWALLOWED = {bad.mistake: bad.keys for bad in BAD_CONFIGS if bad.says == "accepted"}
"""Configs that DeepSpeed accepts, but trains with settings other than given."""

IGNORED = {
    "dead knob": {"zero_optimization": {"stage": 1, "allgather_partitions": False}},
    "stage 3 knob in stage 2": {"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 7}},
    "auto in a pydantic section": {"zero_optimization": {"stage": 1, "reduce_bucket_size": "auto"}},
    "quoted number in a pydantic section": {"zero_optimization": {"stage": "1", "overlap_comm": "false"}},
    "old form of ZeRO": {"zero_optimization": True},
    "old offload key": {"zero_optimization": {"stage": 1, "cpu_offload": False}},
}
"""Configs that DeepSpeed accepts and the check only warns about."""

IN_A_PIPELINE = {
    "pipeline with ZeRO 2": {"zero_optimization": {"stage": 2}},
    "pipeline with ZeRO 3": {"zero_optimization": {"stage": 3}},
    "pipeline without managed accumulation": {"managed_gradient_accumulation": False},
}


def full(keys):
    return {key: value for key, value in {**BASE, **keys}.items() if value is not None}


def probe(cases):
    """Return the results of ``deepspeed_probe.py``, one per case."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = warm_start.run_command(
        [sys.executable, str(Path(__file__).with_name("deepspeed_probe.py"))],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def outcomes():
    groups = (REFUSED, SWALLOWED, IGNORED, IN_A_PIPELINE)
    names = [name for group in groups for name in group]
    cases = [
        {"config": full(case[0] if group is REFUSED else case), "pipeline": group is IN_A_PIPELINE}
        for group in groups
        for case in group.values()
    ]
    return dict(zip(names, probe(cases), strict=True))


@pytest.mark.ranks
@pytest.mark.parametrize("name", REFUSED)
def test_check_rejects_configs_that_deepspeed_rejects(name, outcomes):
    result = check_deepspeed(full(REFUSED[name][0]), ParallelDims(1))

    assert REFUSED[name][1] in outcomes[name]
    if name == "auto batch size":
        assert "DeepSpeed itself needs the number" in result.warnings[0]
    else:
        assert len(result.problems) == 1


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*SWALLOWED, *IGNORED])
def test_check_rejects_misread_and_warns_of_ignored_configs(name, outcomes):
    result = check_deepspeed(full(SWALLOWED.get(name) or IGNORED[name]), ParallelDims(1))

    assert outcomes[name] == "accepted"
    assert bool(result.problems) is (name in SWALLOWED)
    assert result.problems or result.warnings


@pytest.mark.ranks
@pytest.mark.parametrize("name", IN_A_PIPELINE)
def test_check_rejects_pipelines_that_deepspeed_rejects(name, outcomes):
    assert outcomes[name] not in ("accepted", "died")
    assert check_deepspeed(full(IN_A_PIPELINE[name]), ParallelDims(1, is_pipeline=True)).problems


@pytest.mark.ranks
def test_fp16_zero0_rejects_sgd_and_warns_of_adam():
    fp16 = {"fp16": {"enabled": True, "loss_scale": 256}, "zero_allow_untested_optimizer": True}
    configs = [
        full({**fp16, "optimizer": optimizer, "zero_optimization": {"stage": stage}})
        for optimizer in ({"type": "SGD", "params": {"lr": 0.1}}, ADAM)
        for stage in (0, 1)
    ]

    sgd, sgd_1, adam, adam_1 = map(
        float, probe([{"config": one, "pipeline": False, "steps": 3} for one in configs])
    )

    assert 0 <= sgd < sgd_1 / 20
    assert adam > adam_1 / 2
    checks = [check_deepspeed(one, ParallelDims(1)) for one in configs]
    assert [len(one.problems) for one in checks] == [1, 0, 0, 0]
    assert "1, 2 or 3 with fp16" in str(checks[0].problems[0])
    assert [any("loss scale" in warning for warning in one.warnings) for one in checks] == [
        False,
        False,
        True,
        False,
    ]
    without_scale = full({"fp16": {"enabled": True, "loss_scale": 1}})
    assert not check_deepspeed(without_scale, ParallelDims(1)).warnings


@pytest.mark.ranks
def test_valid_config_is_accepted_by_check_and_deepspeed():
    good = [
        full({}),
        full({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5e7}}),
        full(
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "communication_data_type": "BF16"}
        ),
        full(
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 2}}}
        ),
    ]

    assert probe([{"config": config, "pipeline": False} for config in good]) == ["accepted"] * len(good)
    for config in good:
        assert check_deepspeed(config, ParallelDims(1)).problems == ()


@pytest.mark.process
def test_committed_table_matches_installed_release():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import generate_deepspeed_rules as g; "
        "table = g.generate(); sys.stdout.write('\\n' + __import__('json').dumps(table))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    generated = json.loads(result.stdout.splitlines()[-1])
    committed = json.loads(TABLE.read_text())

    assert generated["root"] == committed["root"]
    if generated["torch"] == committed["torch"]:
        assert generated == committed
