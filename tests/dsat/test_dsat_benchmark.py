"""The autotuner's benchmark: what its surfaces promise, and that searches can be played on surfaces and recorded grids."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith("dsat"):
            del sys.modules[name]


def test_a_surface_is_the_same_for_a_seed_and_no_configuration_beats_its_optimum(load: Any) -> None:
    surfaces = load("dsat_surfaces")
    workload = surfaces.WORKLOADS[3]
    space = workload.space()
    grid = surfaces.Grid(workload, space, stages=(1, 2))
    first, again, other = (surfaces.Surface(workload, seed) for seed in (1, 1, 2))

    best = first.optimum(grid)

    assert again.optimum(grid) == best
    assert other.optimum(grid).throughput != best.throughput
    assert first.throughput(best.candidate) == pytest.approx(best.throughput)
    assert best.throughput > first.throughput(space.own())
    measured, once_more = first.outcome(best.candidate), first.outcome(best.candidate)
    assert measured != once_more
    assert measured.value("throughput") == pytest.approx(best.throughput, rel=0.06)


def test_larger_micro_batches_and_buckets_need_more_memory_and_higher_stages_less(load: Any) -> None:
    surfaces = load("dsat_surfaces")
    surface = surfaces.Surface(surfaces.WORKLOADS[2])
    space = surface.workload.space()

    def peak(stage: int, position: int, **settings: Any) -> float:
        values = tuple(sorted((f"zero_optimization.{name}", value) for name, value in settings.items()))
        structure = load("dstrial.dsat.space.space").Structure(stage, values)
        outcome = surface.outcome(space.candidate(structure, position))
        return float(outcome.metrics["peak_memory_bytes"])

    assert peak(2, 2) > peak(2, 1)
    assert peak(1, 0) > peak(2, 0) > peak(3, 0, reduce_bucket_size=500_000_000)
    assert peak(2, 0, reduce_bucket_size=5 * 10**8) > peak(2, 0, reduce_bucket_size=10**6)
    assert peak(2, 0) > peak(2, 0, **{"offload_optimizer.device": "cpu"})


def test_predict_finds_the_best_row_of_the_recorded_grid_though_it_is_not_sure_to_fit(load: Any) -> None:
    benchmark = load("dsat")
    path = BENCHMARKS / "dsat_recorded" / "grid.json"
    best = load("dsat_grid").RecordedGrid.read(path).best.candidate

    for seed in range(3):
        trials = benchmark.play(benchmark.grid_problem(path, seed), "predict", seed)
        assert benchmark.best_of(trials) == best
        assert all(isinstance(outcome, benchmark.Measured) for _, outcome, _ in trials)
        assert len(trials) <= 8


def test_the_program_prints_a_table_and_keeps_every_search(load: Any, tmp_path: Path) -> None:
    kept = tmp_path / "lines.json"
    words = ["--workloads", "0", "--seeds", "1", "--methods", "predict", "asha", "--json", str(kept)]
    load("dsat").main(words)
    lines = [json.loads(text) for text in kept.read_text().splitlines()]
    assert [(one["method"], one["seed"]) for one in lines] == [("predict", 0), ("asha", 0)]
    assert all(one["first_close"] <= one["trials"] for one in lines)
