"""The search space: legal candidates, equal candidates and the space file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from surfaces import BASE, play, space

from dstrial.config.deepspeed_rules.ignored import zero_keys_without_effect
from dstrial.config.parallel_dims import ParallelDims
from dstrial.dsat.cli import SearchFlags
from dstrial.dsat.config import read_space
from dstrial.dsat.core.candidate import BatchSizeGrid, BatchSplit, layered
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.space import Space, Structure
from dstrial.errors import ConfigError
from dstrial.search.sampling import SearchRandom

ZERO = "zero_optimization"


@given(st.integers(1, 512), st.integers(1, 16))
def test_grid_splits_keep_global_batch(per_replica: int, replicas: int) -> None:
    ladder = BatchSizeGrid(per_replica * replicas, replicas, accumulation=1)

    for position in range(ladder.last + 1):
        split = ladder.split(position)
        assert split.micro_batch_size * split.accumulation * replicas == per_replica * replicas
        assert ladder.position(split.micro_batch_size) == position
    assert ladder.split(ladder.last).accumulation == 1


def test_train_batch_size_changes_own_batch() -> None:
    assert space(train_batch_size=512).own().batch == BatchSplit(4, 16, 512)
    with pytest.raises(ConfigError, match="train_batch_size"):
        space(train_batch_size=100)


def test_refused_candidate_is_illegal_with_reason() -> None:
    searched = space()
    structure = Structure(0, ((f"{ZERO}.offload_optimizer.device", "cpu"),))

    reason = searched.illegal_reason(searched.candidate(structure, 0))

    assert reason is not None
    assert "offload_optimizer" in reason


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_dead_key_is_illegal_drawn_structure_is_legal(stage: int) -> None:
    searched, random = space(stages=(0, 1, 2, 3)), SearchRandom(3)
    dead = {"sub_group_size": 10**8, "allgather_bucket_size": 10**6}

    for key, value in dead.items():
        candidate = searched.candidate(Structure(stage, ((f"{ZERO}.{key}", value),)), 0)
        assert (searched.illegal_reason(candidate) is not None) == (key in zero_keys_without_effect(stage))
    for _ in range(20):
        assert searched.illegal_reason(searched.candidate(searched.draw(random, stage), 0)) is None


def test_own_offload_is_neutral_in_other_stages() -> None:
    base = copy.deepcopy(BASE)
    base[ZERO] = {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    }
    searched = space(base, stages=(0, 1, 2, 3))

    for stage in (0, 1, 2, 3):
        candidate = searched.candidate(searched.draw(SearchRandom(0), stage), 0)
        assert searched.illegal_reason(candidate) is None
        assert ("offload_param" in searched.config(candidate)[ZERO]) == (stage == 3)
    assert base[ZERO]["stage"] == 3


def test_identity_ignores_written_defaults() -> None:
    searched = space()
    written = searched.candidate(Structure(1, ((f"{ZERO}.reduce_bucket_size", 500_000_000),)), 2)

    assert written != searched.own()
    identity = ConfigGroups(searched).identity
    assert identity(written) == identity(searched.own())
    other = searched.candidate(Structure(1, ((f"{ZERO}.reduce_bucket_size", 10**6),)), 2)
    assert identity(other) != identity(searched.own())


def test_pipeline_space_has_stages_0_and_1() -> None:
    searched = Space(BASE, ParallelDims(8, pp=2, is_pipeline=True), stages=(0, 1, 2, 3))

    assert searched.stages == (0, 1)
    assert f"{ZERO}.overlap_comm" not in {knob.path for knob in searched.knobs(1)}


def test_config_has_no_autotuning_or_dead_keys() -> None:
    base = copy.deepcopy(BASE)
    base["autotuning"] = {"enabled": True}
    base[ZERO]["allgather_bucket_size"] = 10**6
    searched = space(base)

    config = searched.config(searched.candidate(Structure(3, ()), 3))

    assert config["train_batch_size"] == 256
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == 32
    assert config["optimizer"] == BASE["optimizer"]
    assert "autotuning" not in config
    assert config[ZERO] == {"stage": 3}


def flags(**options: Any) -> SearchFlags:
    return SearchFlags(search_method="predict", config_path="exp.yaml", model_dir=".", **options)


def test_space_file_adds_paths_and_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "zero_optimization.reduce_bucket_size: [1e7, 2.5e7]\n"
        "zero_optimization.offload_optimizer.device: [none, cpu]\n"
        "hyperparameters.checkpointing: [true, false]\n"
    )

    extra = read_space(flags(space=str(path)), {"checkpointing": False})

    assert extra[f"{ZERO}.reduce_bucket_size"] == (10_000_000, 25_000_000)
    searched = space(extra=extra)
    drawn = {knob.path for knob in searched.knobs(1) if knob.is_drawn}
    assert {f"{ZERO}.offload_optimizer.device", "hyperparameters.checkpointing"} <= drawn
    candidate = searched.candidate(searched.draw(SearchRandom(1), 1), 0)
    assert set(candidate.hyperparameters()) == {"checkpointing"}
    # Refused: keys that dsat itself chooses, undeclared hyperparameters, and values that are no list.
    chosen = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        f"{ZERO}.stage",
    )
    path.write_text("".join(f"{name}: [1, 2]\n" for name in chosen))
    with pytest.raises(ConfigError, match="--zero-stages") as error:
        read_space(flags(space=str(path)), {})
    assert len(error.value.problems) == 4
    path.write_text(f"hyperparameters.other: [1]\n{ZERO}.reduce_bucket_size: 3\n")
    with pytest.raises(ConfigError) as error:
        read_space(flags(space=str(path)), {})
    assert len(error.value.problems) == 2


def test_tune_replaces_values_of_space_file(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(f"{ZERO}.sub_group_size: [1e8, 1e9]\ntensor_parallel.autotp_size: [1]\n")
    settings = ["tensor_parallel.autotp_size=1,2", "hyperparameters.act=[gelu, relu]"]

    extra = read_space(flags(space=str(path), tune=settings), {"act": "relu"})

    assert extra[f"{ZERO}.sub_group_size"] == (10**8, 10**9)
    assert extra["tensor_parallel.autotp_size"] == (1, 2)
    assert extra["hyperparameters.act"] == ("gelu", "relu")
    for wrong, message in (
        ("stage", "KEY=V1,V2"),
        ("a={", "YAML"),
        (f"{ZERO}.stage=1", "--zero-stages"),
        ("a=", "one value"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            read_space(flags(tune=[wrong]), {})
        assert error.value.problems[0].where.startswith("--tune")
    with pytest.raises(ConfigError) as error:
        read_space(flags(tune=["stage", "=1"]), {})
    assert len(error.value.problems) == 2


def test_layered_keeps_none_values_of_base() -> None:
    below = {"a": {"x": None, "y": 1}, "b": 1}

    assert layered(below, {"a": {"y": 2}, "b": {"c": 3}}) == {"a": {"x": None, "y": 2}, "b": {"c": 3}}
    assert below == {"a": {"x": None, "y": 1}, "b": 1}


def test_written_hyperparameter_default_is_own_configuration() -> None:
    searched = space(extra={"hyperparameters.width": (8, 16)}, hyperparameters={"width": 8, "depth": 2})
    own = searched.own()

    written, other = (
        searched.candidate(Structure(1, (("hyperparameters.width", width),)), 2) for width in (8, 16)
    )

    identity = ConfigGroups(searched).identity
    assert identity(written) == identity(own) != identity(other)
    assert searched.describe(written) == searched.describe(own)
    assert searched.describe(other).endswith("width=16")
    measured = [action.candidate for action in play("asha", searched, max_trials=40).measured]
    assert len({identity(candidate) for candidate in measured}) == len(measured)
    bases = [searched.candidate(structure, 2) for structure in ConfigGroups(searched).bases()]
    assert len({identity(candidate) for candidate in bases}) == len(bases)


@pytest.mark.parametrize(
    ("path", "value", "others", "is_refused"),
    [
        (f"{ZERO}.sub_grup_size", 10**8, {}, True),
        ("optimiser.params.lr", 1e-3, {}, True),
        (f"{ZERO}.allgather_partitions", True, {}, True),
        (f"{ZERO}.sub_group_size", 10**8, {}, False),
        (f"{ZERO}.offload_optimizer.ratio", 0.3, {}, False),
        (f"{ZERO}.offload_optimizer.device", "cpuu", {}, True),
        ("hyperparameters.width", 3, {}, False),
        # Legal only together with a value of another path, even if the file has further illegal values.
        ("fp16.enabled", True, {}, True),
        ("fp16.enabled", True, {f"{ZERO}.nothing": (1,), "bf16.enabled": (True, False)}, False),
        (f"{ZERO}.nothing", 1, {"bf16.enabled": (True, False)}, True),
    ],
)
def test_rejection_reason_of_value_considers_all_stages(
    path: str, value: object, others: dict[str, Any], is_refused: bool
) -> None:
    searched = space(stages=(1, 2, 3), extra={path: (value,), **others})

    assert (searched.rejection_reason(path, value) is not None) == is_refused


def test_single_stage_path_leaves_other_stages() -> None:
    path = f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    searched = space(stages=(1, 2, 3), extra={path: (True, False)})

    named = {stage: path in {knob.path for knob in searched.knobs(stage)} for stage in (1, 2, 3)}

    assert named == {1: False, 2: False, 3: True}
    assert {structure.stage for structure in ConfigGroups(searched).bases()} == {1, 2, 3}


def test_space_file_precision_changes_structure_width() -> None:
    searched = space(extra={"bf16.enabled": (True, False)})
    groups = ConfigGroups(searched)

    widths = {
        dict(one.settings).get("bf16.enabled"): groups.setup(one).bytes_per_value for one in groups.bases()
    }

    assert widths == {None: 2, True: 2, False: 4}
