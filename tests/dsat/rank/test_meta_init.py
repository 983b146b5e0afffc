"""Models of shapes: what is changed in torch while one is built, and the fake parameters that it gets for a dry run."""

from __future__ import annotations

import deepspeed
import torch
from torch import nn

from dstrial.dsat.rank.meta_init import renew_parameters, shapes_only


def test_parameters_built_as_shapes_have_no_memory_and_keep_gradient_flag_and_type() -> None:
    with shapes_only():
        layer = nn.Linear(64, 32, bias=False)
        layer.requires_grad_(False)

        moved = nn.Linear(4, 4).to(device="cpu", dtype=torch.bfloat16)

    assert layer.weight.is_meta
    assert layer.weight.shape == (32, 64)
    assert not layer.weight.requires_grad
    assert moved.weight.is_meta
    assert moved.weight.dtype == torch.bfloat16
    assert not nn.Linear(2, 2).weight.is_meta


def test_initial_values_are_not_computed_for_a_shape_and_are_computed_again_afterwards() -> None:
    with shapes_only():
        kept = nn.init.constant_(torch.zeros(3), 7.0)

    assert kept.tolist() == [0.0, 0.0, 0.0]
    assert nn.init.constant_(torch.zeros(3), 7.0).tolist() == [7.0, 7.0, 7.0]


def test_renewed_parameters_have_memory_and_tied_ones_stay_tied() -> None:
    with shapes_only():
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
        model[1].weight = model[0].weight
    old = model[0].weight

    renewed = renew_parameters(model)

    assert renewed[id(old)] is model[0].weight is model[1].weight
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert model[2].running_mean.shape == (3,)


def test_models_that_would_be_divided_while_they_are_built_are_shapes_too() -> None:
    with shapes_only(), deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1}):
        layer = nn.Linear(4, 2)
        deepspeed.zero.Init(module=layer)

    assert layer.weight.is_meta
    assert layer.weight.shape == (2, 4)
    assert not hasattr(layer.weight, "ds_id")
