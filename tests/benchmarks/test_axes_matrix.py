"""Sample of the parallel-axes benchmark: five axes with three optimizers each."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("torchdata")
pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("axis", "stage"), [("dp", 3), ("pp", 1), ("tp", 1), ("sp", 2), ("ep", 1), ("autoep", 3)]
)
def test_axis_trains_resumes_and_reshapes_or_is_rejected(
    axis: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    matrix = importlib.import_module("axes_matrix")
    cells = [matrix.Cell(axis, stage, optimizer) for optimizer in ("AdamW", "client", "Muon")]
    records = list(matrix.run(cells))
    assert not [record for record in records if not matrix.is_right(record)]
    assert records[0]["resumed"] == records[1]["resumed"] == 0.0
    if axis == "tp":
        assert "Muon needs whole matrices" in records[2]["trained"]
