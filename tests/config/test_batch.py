import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.config.batch import resolve_batch, solve_batch
from dstrial.errors import ConfigError

SIZES = st.integers(min_value=1, max_value=64)


def deepspeed_sizes(total, micro, steps, replicas):
    """Return the sizes DeepSpeed computes, or None if its assertion would fail."""
    if total is not None and micro is not None and steps is None:
        steps = total // micro // replicas
    elif total is not None and steps is not None and micro is None:
        micro = total // replicas // steps
    elif micro is not None and steps is not None and total is None:
        total = micro * steps * replicas
    elif total is not None and micro is None:
        steps, micro = 1, total // replicas
    elif micro is not None and total is None:
        total, steps = micro * replicas, 1
    holds = total == micro * steps * replicas and min(total, micro, steps) > 0
    return (total, micro, steps) if holds else None


@given(
    st.none() | SIZES,
    st.none() | SIZES,
    st.none() | SIZES,
    st.integers(min_value=1, max_value=8),
    st.booleans(),
)
def test_solve_batch_agrees_with_deepspeed(total, micro, steps, replicas, writes_auto):
    if total is None and micro is None:
        return
    given_sizes = ["auto" if size is None and writes_auto else size for size in (total, micro, steps)]
    expected = deepspeed_sizes(total, micro, steps, replicas)
    if expected is None:
        with pytest.raises(ConfigError):
            solve_batch(*given_sizes, replicas)
    else:
        solution = solve_batch(*given_sizes, replicas)
        assert len(solution.solved) == (total, micro, steps).count(None)
        assert expected == (
            solution.train_batch_size,
            solution.train_micro_batch_size_per_gpu,
            solution.gradient_accumulation_steps,
        )


def test_batch_equation_shows_all_sizes():
    assert solve_batch(64, 8, "auto", 2).equation == (
        "train_batch_size 64 = train_micro_batch_size_per_gpu 8 x gradient_accumulation_steps 4 x 2 data-parallel replicas"
    )


@pytest.mark.parametrize("steps", [None, "auto", 4])
def test_accumulation_steps_alone_are_not_enough(steps):
    with pytest.raises(
        ConfigError, match="expected at least train_batch_size or train_micro_batch_size_per_gpu"
    ):
        solve_batch("auto", None, steps, 2)


@pytest.mark.parametrize("size", [0, -4, 2.5, "8", True, [8]])
def test_non_positive_or_non_integer_size_is_rejected(size):
    with pytest.raises(
        ConfigError, match=r"train_micro_batch_size_per_gpu is .*; expected an integer of at least 1"
    ):
        solve_batch(None, size, None, 1)


def test_resolve_batch_fills_sizes_without_mutating_config():
    config = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": False}}

    assert resolve_batch(config, 4) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": False},
    }
    assert config["train_micro_batch_size_per_gpu"] == "auto"
