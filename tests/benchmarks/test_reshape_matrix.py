"""Sample of the reshape benchmark: checkpoint layouts on one and two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.ranks


def program() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "reshape_matrix.py"
    spec = importlib.util.spec_from_file_location("reshape_matrix", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.exhaustive("[bf16-sgd-layouts1]")
@pytest.mark.parametrize(
    ("precision", "case", "layouts"),
    [
        ("fp32", "groups", ["zero 0", "zero 3", "pipeline zero 1"]),
        ("bf16", "sgd", ["zero 0", "zero 2"]),
    ],
)
def test_reshape_matrix_resumes_every_layout_pair(precision: str, case: str, layouts: list[str]) -> None:
    matrix = program()

    records = matrix.run([1, 2], precision, [case], layouts)

    num_cells = sum(matrix.is_legal(layout, num_ranks) for layout in layouts for num_ranks in (1, 2))
    assert len(records) == num_cells**2
    wrong = [record for record in records if not matrix.is_right(record, precision)]
    assert not wrong, wrong
