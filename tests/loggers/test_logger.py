"""Conversion of metrics to the names and numbers that loggers accept."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dstrial.loggers.logger import flat, numbers_of
from dstrial.loggers.mlflow_logger import accepted_name
from dstrial.loggers.wandb_logger import next_step


def test_numbers_of_converts_to_plain_numbers() -> None:
    numbers, others = numbers_of(
        {
            "float": np.float32(0.5),
            "array": np.array(3),
            "flag": True,
            "large": 2**60,
            "nan": math.nan,
            "inf": -math.inf,
            "none": None,
            "text": "1",
            "vector": np.array([1.0]),
            "tensor": torch.tensor(1.0),
            "huge": 10**400,
        }
    )
    assert {name: (type(value), value) for name, value in numbers.items() if name != "nan"} == {
        "float": (float, 0.5),
        "array": (int, 3),
        "flag": (int, 1),
        "large": (float, float(2**60)),
        "inf": (float, -math.inf),
    }
    assert math.isnan(numbers["nan"])
    assert others == ["none", "text", "vector", "tensor", "huge"]


def test_flat_joins_nested_names_with_dots() -> None:
    assert flat({"a": 1, "b": {"c": {"d": [1]}, "e": {}}}) == {"a": 1, "b.c.d": [1], "b.e": {}}


def test_accepted_name_keeps_valid_mlflow_names() -> None:
    assert accepted_name("training/loss of: a-b_c.1") == "training/loss of: a-b_c.1"
    assert accepted_name("training/a☃[0]") == "training/a__0_"


@pytest.mark.parametrize(
    ("seen", "batches", "steps"),
    [
        pytest.param(-1, [0, 10, 10, 20], [0, 10, 10, 20], id="a new run"),
        pytest.param(30, [10, 20, 20, 30, 40], [31, 32, 32, 33, 40], id="trained again after a resume"),
        pytest.param(1000, [998, 999, 1000, 1001], [1001, 1002, 1003, 1004], id="each batch reported"),
    ],
)
def test_wandb_step_is_batch_or_next_free(seen: int, batches: list[int], steps: list[int]) -> None:
    step, before, found = seen, None, []
    for batch in batches:
        step = next_step(step, before, batch)
        before = batch
        found.append(step)
    assert found == steps
