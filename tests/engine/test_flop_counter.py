"""FLOPs are counted by operation, and are called unknown where an operation hides what it does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dstrial.engine.model_flops import FlopCounter, why_uncountable

WIDTH, RECORDS = 32, 4
ONE_LAYER = 2 * RECORDS * WIDTH * WIDTH


@pytest.fixture
def hidden_square() -> Iterator[Any]:
    """An operation of a library's own, as fused kernels are."""
    library = torch.library.Library("dstrial_test", "FRAGMENT")
    library.define("square(Tensor x) -> Tensor")
    library.impl("square", lambda x: x @ x, "CompositeExplicitAutograd")
    yield torch.ops.dstrial_test.square
    library._destroy()


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def test_a_model_of_matrices_needs_six_flops_a_parameter_and_record_but_for_the_first_gradient() -> None:
    model = layers()
    with FlopCounter() as counter:
        model(torch.randn(RECORDS, WIDTH)).sum().backward()

    assert counter.count.total == (3 + 3 + 2) * ONE_LAYER
    assert counter.count.model == counter.count.total
    assert counter.count.unknown is None


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputation_is_told_apart(is_reentrant: bool) -> None:
    model = layers()
    records = torch.randn(RECORDS, WIDTH, requires_grad=True)
    with FlopCounter() as counter:
        checkpoint(model, records, use_reentrant=is_reentrant).sum().backward()

    assert counter.count.model == (3 + 6) * ONE_LAYER
    # The newer kind stops once all that backward needs is there again: not at the last layer.
    assert counter.count.recomputed == pytest.approx(3 * ONE_LAYER, rel=0.35)
    assert counter.count.total == counter.count.model + counter.count.recomputed


def test_gradients_that_are_differentiated_again_are_the_models() -> None:
    model = layers()
    with FlopCounter() as counter:
        model(torch.randn(RECORDS, WIDTH)).pow(2).sum().backward(create_graph=True)

    assert counter.count.recomputed == 0
    assert counter.count.total == (3 + 3 + 2) * ONE_LAYER


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_what_a_module_takes_may_be_asked_for(create_graph: bool) -> None:
    """As penalties on gradients, forces and equations do; torch's own counter fails there."""
    model, records = layers(), torch.randn(RECORDS, WIDTH, requires_grad=True)
    with FlopCounter() as counter:
        (slope,) = torch.autograd.grad(model(records).pow(2).sum(), records, create_graph=create_graph)
        if create_graph:
            slope.pow(2).sum().backward()

    (expected,) = torch.autograd.grad(model(records).pow(2).sum(), records)
    assert torch.equal(slope, expected)
    assert counter.count.recomputed == 0
    assert counter.count.total >= (3 + 3) * ONE_LAYER


def test_an_operation_without_a_formula_makes_the_count_unknown_and_is_named(hidden_square: Any) -> None:
    with FlopCounter() as counter:
        hidden_square(torch.ones(4, 4))

    assert counter.count.unknown is not None
    assert "dstrial_test.square has no formula" in counter.count.unknown


def test_a_formula_that_fails_ends_nothing() -> None:
    def fail(*_args: object, **_kwargs: object) -> int:
        raise AssertionError("an assumption of the formula's")

    counter = FlopCounter()
    counter.flop_registry[torch.ops.aten.mm] = fail
    with counter:
        product = torch.ones(2, 2) @ torch.ones(2, 2)

    assert product.tolist() == [[2, 2], [2, 2]]
    assert counter.count.unknown is not None
    assert "aten.mm cannot be counted (AssertionError)" in counter.count.unknown


def test_an_optimizers_products_are_not_the_models() -> None:
    with FlopCounter() as counter:
        assert counter.paused(lambda: torch.ones(4, 4) @ torch.ones(4, 4)).shape == (4, 4)

    assert counter.count.total == 0


class Engine:
    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module


def test_a_compiled_module_cannot_be_counted_and_the_reason_names_it() -> None:
    model = layers()
    assert why_uncountable([Engine(model)]) is None

    model[1].compile()
    reason = why_uncountable([Engine(model)])
    assert reason == "Linear is compiled, which hides its operations"
