"""Whether two values of saved state are the same, tensors by their content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def is_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(left).cpu(), torch.as_tensor(right).cpu()))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    return bool(left == right)
