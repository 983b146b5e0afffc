"""Layouts into which a checkpoint can be reshaped, and the state that is carried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reshape_program
import torch
from sample_layouts import PLACE, PLAIN_LAYOUT

from dstrial.checkpoint.layout import Layout
from dstrial.engine.state import merged_tied_modules
from dstrial.errors import CheckpointLayoutError
from dstrial.resume.plan import reshape_problems
from dstrial.testing.ranks import run_function

LAYOUT = dataclasses.replace(
    PLAIN_LAYOUT, zero_stage=0, optimizer="AdamW", lr_scheduler="WarmupLR", parameters=(PLACE,)
)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("AdamW", "DeepSpeedCPUAdam", True),
        ("FusedAdam", "DeepSpeedCPUAdam", True),
        ("FusedAdam", "Adam", True),
        ("Adam", "AdamW", False),
        ("FusedLion", "DeepSpeedCPULion", True),
        ("FusedLion", "FusedAdam", False),
    ],
)
def test_optimizer_names_of_same_algorithm_are_equal(one: str, other: str, is_same: bool) -> None:
    for saved, now in ((one, other), (other, one)):
        problems = reshape_problems(
            dataclasses.replace(LAYOUT, optimizer=saved), dataclasses.replace(LAYOUT, optimizer=now)
        )
        assert (problems == []) == is_same


def with_place(**changes: object) -> Layout:
    return dataclasses.replace(LAYOUT, parameters=(dataclasses.replace(PLACE, **changes),))


def test_ranks_stages_offload_and_precision_may_change() -> None:
    other = dataclasses.replace(
        LAYOUT,
        engine_kind="pipeline",
        world_size=6,
        data_parallel_size=3,
        pipeline_stages=2,
        zero_stage=1,
        offload_optimizer="cpu",
        precision="bf16",
        wrapper="DeepSpeedZeroOptimizer",
    )
    assert reshape_problems(LAYOUT, other) == []


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (
            dataclasses.replace(LAYOUT, model_parallel_size=2),
            "tensor-parallel size was 1, is 2, and only AutoTP's layers can be cut anew: set it back",
        ),
        (dataclasses.replace(LAYOUT, optimizer="SGD"), "optimizer was AdamW, is SGD: set it back"),
        (dataclasses.replace(LAYOUT, optimizer=""), "optimizer was AdamW, is none: set it back"),
        (
            dataclasses.replace(LAYOUT, lr_scheduler="OneCycle"),
            "learning-rate scheduler was WarmupLR, is OneCycle: set it back",
        ),
        (
            dataclasses.replace(LAYOUT, offload_optimizer="nvme"),
            "an engine whose state is offloaded to NVMe keeps its layout: set it back",
        ),
        (with_place(name="kernel"), "parameter kernel is new: use the same model"),
        (with_place(name="kernel"), "parameter weight is gone: use the same model"),
        (
            with_place(shape=(3, 4)),
            "parameter weight had shape (4, 3), has (3, 4): use the same model",
        ),
        (
            dataclasses.replace(LAYOUT, wrapper="MiCS_Optimizer"),
            "an engine whose MiCS_Optimizer arranges its state in its own way keeps its layout: set it back",
        ),
    ],
)
def test_reshape_problem_names_change_and_remedy(now: Layout, problem: str) -> None:
    assert problem in reshape_problems(LAYOUT, now)


def test_tensor_parallel_pipeline_keeps_its_layout() -> None:
    saved = dataclasses.replace(LAYOUT, model_parallel_size=2, engine_kind="pipeline")
    (problem,) = reshape_problems(saved, dataclasses.replace(saved, zero_stage=1))
    assert "whose layers are cut over 2 tensor-parallel ranks keeps its layout" in problem


@pytest.mark.parametrize("is_unfrozen", [True, False])
def test_reshape_with_changed_requires_grad_names_remedy(is_unfrozen: bool) -> None:
    frozen, trained = (
        dataclasses.replace(
            LAYOUT,
            parameters=tuple(
                dataclasses.replace(PLACE, name=f"layer{idx}", trainable=trainable) for idx in range(50)
            ),
        )
        for trainable in (False, True)
    )

    [problem] = reshape_problems(frozen, trained) if is_unfrozen else reshape_problems(trained, frozen)

    state = "trained" if is_unfrozen else "frozen"
    assert problem == (
        f"50 parameters are {state} now and were not (layer0, layer1, layer10, …): set their requires_grad as it was, or begin "
        "a new trial with the weights that `dstrial checkpoint export` writes"
    )


def test_frozen_or_empty_parameters_may_lack_group() -> None:
    for changes in ({"trainable": False}, {"shape": (0, 3)}):
        in_group, in_none = with_place(**changes), with_place(**changes, group_idx=None)
        assert reshape_problems(in_group, in_none) == reshape_problems(in_none, in_group) == []


def test_merged_tied_modules_must_be_equal() -> None:
    one = {"tied_modules": {"shared": {"weight": torch.ones(2), "bias": torch.zeros(2)}}}
    other = {"tied_modules": {"shared": {"weight": torch.ones(2), "bias": torch.ones(2)}}}
    assert merged_tied_modules([one, {"tied_modules": {}}, one]) == one["tied_modules"]
    with pytest.raises(CheckpointLayoutError, match=r"tied_modules\.shared\.bias differ"):
        merged_tied_modules([one, other])


@pytest.mark.ranks
def test_dynamic_loss_scale_survives_zero_stage_change(tmp_path: Path) -> None:
    by_stages = run_function(reshape_program.carry_loss_scales, 2, str(tmp_path))[0].value

    assert len(by_stages) == 4
    for stages, (problem, saved, loaded) in by_stages.items():
        assert problem is None, f"{stages}: {problem}"
        assert saved["cur_scale"] > 2**4
        assert loaded == saved, stages


@pytest.mark.ranks
def test_load_refreshes_hpz_secondary_weights(tmp_path: Path) -> None:
    """ZeRO++ hpZ keeps a second copy of the weights within each machine."""
    problem, before, after = run_function(reshape_program.load_into_second_copies, 2, str(tmp_path))[0].value
    assert problem is None
    assert after == pytest.approx(before, abs=1e-6)


@pytest.mark.ranks
def test_unequal_biases_of_tied_layer_are_refused(tmp_path: Path) -> None:
    for result in run_function(reshape_program.merge_untied_biases, 2, str(tmp_path)):
        assert result.value.startswith("CheckpointLayoutError: the checkpoint has another layout")
        assert (
            "the tied parameters tied_modules.shared.bias differ between the pipeline's stages"
            in result.value
        )
        assert "tied_weight_attr" in result.value


@pytest.mark.ranks
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_reshape_comparison_detects_wrong_layout(tmp_path: Path, zero_stage: int) -> None:
    for result in run_function(reshape_program.load_from_swapped_places, 2, str(tmp_path), zero_stage):
        assert "has values that differ from the checkpoint for" in str(result.value)
        assert "norm.weight" in result.value


@pytest.mark.ranks
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_reshape_fused_adam_without_zero_keeps_step(tmp_path: Path) -> None:
    """Into ZeRO 1, from two pipeline stages into one, and back; states keep step 3."""
    for result in run_function(reshape_program.reshape_fused_adam, 2, str(tmp_path), deadline_s=600):
        assert len(result.value) == 6
        for pair, outcome in result.value.items():
            assert outcome == (None, {3.0}), pair


UNAVAILABLE = {"muadam": "mup", "muadamw": "mup", "musgd": "mup", "lamb": "FusedLamb", "lion": "FusedLion"}
"""Optimizers that need a GPU or a package that is not installed."""

BIT_CASES = [(name, "fp32", False) for name in reshape_program.OPTIMIZERS]
BIT_CASES += [("adam", "bf16", False), ("muon", "bf16", False), ("muon", "fp32", True)]


@pytest.mark.ranks
@pytest.mark.exhaustive("[muon-fp32-False]")
@pytest.mark.parametrize(("optimizer", "precision", "is_offloaded"), BIT_CASES)
def test_reshape_by_optimizer_is_equal_or_refused(
    tmp_path: Path, optimizer: str, precision: str, is_offloaded: bool
) -> None:
    """ZeRO 0 to 3 on 1 and 2 ranks are 8 layouts; each is loaded in each: 64 pairs."""
    args = (str(tmp_path), optimizer, precision, is_offloaded)

    def on_ranks(function: Callable[..., Any], num_ranks: int) -> Any:
        return run_function(function, num_ranks, *args, deadline_s=300)[0].value

    num_saved = 0
    for num_ranks in (1, 2):
        problems = on_ranks(reshape_program.save_in_all_stages, num_ranks)
        num_saved += list(problems.values()).count(None)
        assert optimizer in UNAVAILABLE or set(problems.values()) == {None}, problems
    outcomes: dict[str, str] = {}
    for num_ranks in (1, 2):
        outcomes |= on_ranks(reshape_program.load_in_all_stages, num_ranks)
    print(*(f"{pair}: {outcome}" for pair, outcome in outcomes.items()), sep="\n")

    if not outcomes:
        pytest.skip(f"DeepSpeed makes {optimizer} here in no ZeRO stage")
    assert len(outcomes) == num_saved**2
    refusal = f"whose optimizer {optimizer.capitalize()} keeps state of unknown layout"
    for pair, outcome in outcomes.items():
        if optimizer == "adafactor":
            assert refusal in outcome, pair
            assert "after changes" not in outcome, pair
        else:
            assert outcome.startswith("equal"), f"{pair}: {outcome}"
