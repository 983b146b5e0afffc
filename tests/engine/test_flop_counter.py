"""Counting FLOPs: of the model, of recomputation, and of unknown operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as checkpointing_of_deepspeed
from deepspeed_release import needs_0_19_8
from torch.utils.checkpoint import checkpoint

from dstrial.engine.dryrun.tracker import Tracker
from dstrial.engine.model_flops import FlopCount, FlopCounter, why_uncountable

WIDTH, RECORDS = 32, 4
ONE_LAYER = 2 * RECORDS * WIDTH * WIDTH


@pytest.fixture
def hidden_square() -> Iterator[Any]:
    """Yield a custom operation without a FLOP formula, like a fused kernel."""
    library = torch.library.Library("dstrial_test", "FRAGMENT")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x @ x, "CompositeExplicitAutograd")
    yield torch.ops.dstrial_test.square
    library._destroy()


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def test_linear_model_needs_six_flops_per_parameter() -> None:
    """Except in the first layer, whose input needs no gradient."""
    model = layers()
    with FlopCounter() as counter:
        model(torch.randn(RECORDS, WIDTH)).sum().backward()

    assert counter.count.total == (3 + 3 + 2) * ONE_LAYER
    assert counter.count.model == counter.count.total
    assert counter.count.unknown is None


CHECKPOINTS: dict[str, Callable[..., torch.Tensor]] = {
    "torch": lambda model, records: checkpoint(model, records, use_reentrant=False),
    "torch, reentrant": lambda model, records: checkpoint(model, records, use_reentrant=True),
    "DeepSpeed": checkpointing_of_deepspeed.checkpoint,
    "DeepSpeed, not reentrant": checkpointing_of_deepspeed.non_reentrant_checkpoint,
}


def call(model: torch.nn.Module, records: torch.Tensor) -> torch.Tensor:
    return model(records)


def counted(train: Callable[..., object], wrapped: Callable[..., torch.Tensor]) -> FlopCount:
    """Return the FLOPs of ``train`` when ``wrapped`` calls the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(part for one in layers() for part in (one, torch.nn.Tanh())))
    records = torch.randn(RECORDS, WIDTH, requires_grad=True)
    with FlopCounter() as counter:
        train(model, records, wrapped)
    return counter.count


def slope_of(model: Any, records: Any, wrapped: Any) -> torch.Tensor:
    (slope,) = torch.autograd.grad(wrapped(model, records).pow(2).sum(), records, create_graph=True)
    return slope


TRAININGS: dict[str, Callable[..., object]] = {
    "gradients": lambda model, records, wrapped: wrapped(model, records).pow(2).sum().backward(),
    "gradients with their graph": lambda model, records, wrapped: (
        wrapped(model, records).pow(2).sum().backward(create_graph=True)
    ),
    "gradient penalty": lambda model, records, wrapped: slope_of(model, records, wrapped).norm().backward(),
    # As force fields do: the checkpointed function itself computes a gradient.
    "checkpointed gradient": lambda model, records, wrapped: (
        wrapped(lambda one: slope_of(model, one, call), records).norm().backward()
    ),
}


def with_each_kind(training: str) -> list[Any]:
    # Activation checkpointing of DeepSpeed 0.19.0 asks for a stream, which a CPU does not have.
    return [
        pytest.param(training, kind, marks=needs_0_19_8 if kind.startswith("DeepSpeed") else ())
        for kind in CHECKPOINTS
    ]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    ("training", "kind"),
    [
        *with_each_kind("gradients"),
        *with_each_kind("gradients with their graph"),
        # The other kinds of checkpoints cannot be differentiated twice.
        ("gradient penalty", "torch"),
        ("checkpointed gradient", "torch"),
    ],
)
def test_recomputation_is_counted_separately(training: str, kind: str) -> None:
    without, count = (counted(TRAININGS[training], wrapped) for wrapped in (call, CHECKPOINTS[kind]))

    assert without.recomputed == 0
    assert without.unknown is None
    assert count.model == without.total
    assert count.recomputed >= 3 * ONE_LAYER
    assert count.unknown is None


def test_nonreentrant_checkpoint_recomputes_only_needed_layers() -> None:
    records = torch.randn(RECORDS, WIDTH, requires_grad=True)
    with FlopCounter() as counter:
        checkpoint(layers(), records, use_reentrant=False).sum().backward()

    assert counter.count.model == (3 + 6) * ONE_LAYER
    assert counter.count.recomputed == 2 * ONE_LAYER


def test_operation_without_formula_makes_count_unknown(hidden_square: Any) -> None:
    with FlopCounter() as counter:
        hidden_square(torch.ones(4, 4))

    assert counter.count.unknown is not None
    assert "dstrial_test.square has no formula" in counter.count.unknown


def test_failing_formula_makes_count_unknown() -> None:
    def fail(*_args: object, **_kwargs: object) -> int:
        raise AssertionError("an assumption of the formula's")

    counter = FlopCounter()
    counter.flop_registry[torch.ops.aten.mm] = fail
    with counter:
        product = torch.ones(2, 2) @ torch.ones(2, 2)

    assert product.tolist() == [[2, 2], [2, 2]]
    assert counter.count.unknown is not None
    assert "aten.mm cannot be counted (AssertionError)" in counter.count.unknown


def test_paused_counter_ignores_optimizer_products() -> None:
    with FlopCounter() as counter:
        assert counter.paused(lambda: torch.ones(4, 4) @ torch.ones(4, 4)).shape == (4, 4)

    assert counter.count.total == 0


class Engine:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def test_compiled_module_is_uncountable_with_reason() -> None:
    model = layers()
    assert why_uncountable([Engine(model)]) is None

    model[1].compile()
    reason = why_uncountable([Engine(model)])
    assert reason == "Linear is compiled, which hides its operations"


def gated(records: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(records) * records


def attended(records: torch.Tensor) -> torch.Tensor:
    query = records.unflatten(-1, (2, -1)).transpose(0, 1)[None]
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


def grouped(records: torch.Tensor) -> torch.Tensor:
    experts = torch.linspace(-1, 1, 2 * WIDTH * WIDTH).view(2, WIDTH, WIDTH)
    return torch.nn.functional.grouped_mm(
        records, experts, offs=torch.tensor([1, RECORDS], dtype=torch.int32)
    )


@pytest.mark.parametrize(
    "function", [gated, attended, torch.nn.functional.gelu, torch.nn.functional.softplus]
)
def test_counting_changes_no_bit_of_gradients(function: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    records = torch.randn(64, WIDTH, requires_grad=True)
    (expected,) = torch.autograd.grad(function(records).pow(2).sum(), records)
    with FlopCounter():
        (found,) = torch.autograd.grad(function(records).pow(2).sum(), records)

    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [(attended, 2 * 2 * RECORDS * RECORDS * WIDTH, 2.5), (grouped, ONE_LAYER, 1)],
    ids=["attention", "experts"],
)
def test_operation_without_torch_formula_is_counted(
    function: Callable[..., torch.Tensor], forward: int, backward: float
) -> None:
    if function is grouped and not hasattr(torch.nn.functional, "grouped_mm"):
        pytest.skip("this torch has no grouped product")
    records = torch.randn(RECORDS, WIDTH, requires_grad=True)
    with FlopCounter() as counter:
        function(records).pow(2).sum().backward()
    with Tracker() as of_dry_run:
        function(records).pow(2).sum().backward()

    assert counter.count.total == of_dry_run.flops[-1][1] == forward * (1 + backward)
