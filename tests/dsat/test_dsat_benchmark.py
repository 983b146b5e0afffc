"""The dsat benchmark: searches on formulas and on a recorded grid."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of ``benchmarks``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("dsat"):
            del sys.modules[name]


def test_predict_finds_best_of_recorded_grid(load: Any) -> None:
    benchmark = load("dsat")
    path = BENCHMARKS / "dsat_recorded" / "grid.json"
    best = load("dsat_grid").RecordedGrid.read(path).best.candidate

    for seed in range(3):
        trials = benchmark.play(benchmark.grid_problem(path, seed), "predict", seed)
        assert benchmark.best_of(trials) == best
        assert all(isinstance(outcome, benchmark.Measured) for _, outcome, _ in trials)
        assert len(trials) <= 8
