"""What is a token and what is not, and that nothing is guessed."""

from __future__ import annotations

import collections

import pytest
import torch

from dstrial.trial.trial import tokens_in

IDS = torch.zeros(2, 8, dtype=torch.long)


@pytest.mark.parametrize(
    ("micro_batch", "tokens"),
    [
        ({"input_ids": IDS}, 16),
        (collections.UserDict(input_ids=IDS, labels=IDS), 16),
        (({"input_ids": IDS}, IDS), 16),
        ((IDS, IDS), None),
        (IDS, None),
        ({"pixel_values": IDS}, None),
        ({"input_ids": "text"}, None),
        ([], None),
        (None, None),
    ],
)
def test_tokens_are_those_of_input_ids_and_of_nothing_else(micro_batch: object, tokens: int | None) -> None:
    assert tokens_in(micro_batch) == tokens
