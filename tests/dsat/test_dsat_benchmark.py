"""The autotuner's benchmark: what its surfaces promise, and that searches can be played on surfaces and recorded grids."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrial.dsat.predictor.profiles import PredictInputs

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith(("dsat", "record_dsat_")):
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


def test_a_search_finds_a_recorded_row_for_everything_that_it_asks_for(load: Any) -> None:
    recorder, grids, play = load("record_dsat_grid"), load("dsat_grid"), load("dsat_play")
    rows = []
    for candidate in recorder.grid():
        throughput = 10 + candidate.batch.micro_batch_size - candidate.stage
        metrics = {"throughput": throughput, "latency": 32e6 / throughput}
        rows.append(
            {
                "candidate": candidate.to_json(),
                "repeats": [metrics],
                "throughput": throughput,
                "low": 0.99 * throughput,
                "high": 1.01 * throughput,
                "peak_bytes": 1e8 + 1e7 * candidate.batch.micro_batch_size,
            }
        )
    header = {
        "base": recorder.BASE,
        "extra": recorder.EXTRA,
        "stages": recorder.STAGES,
        "ranks": 2,
        "cap_bytes": 1.7e8,
    }
    grid = grids.RecordedGrid({"header": header, "rows": rows})

    for name in ("predict", "asha", "random-legal"):
        problem = play.Problem(grid.space, grid.ground(0), 2, 1e6, None, 1e7, grid.cap_bytes)
        played = play.play_ours(problem, name, 0, play.Cost(), max_trials=8)
        assert played.trials[0][0] == grid.space.own()
        assert played.best is not None
        assert grid.row(played.best).throughput >= grid.row(grid.space.own()).throughput
    assert len(rows) >= 200
    assert grid.best.candidate.batch.micro_batch_size == 4
    assert not grid.is_close(grid.row(grid.space.own()))


def test_predict_finds_the_best_row_of_the_recorded_grid_though_it_is_not_sure_to_fit(load: Any) -> None:
    benchmark, play = load("dsat"), load("dsat_play")
    path = BENCHMARKS / "dsat_recorded" / "grid.json"
    grid = load("dsat_grid").RecordedGrid.read(path)
    case = benchmark.GridCase(grid, path.with_name("grid-inputs.json"))

    for seed in range(3):
        problem, _ = case.at(seed)
        played = play.play_ours(problem, "predict", seed, play.Cost())
        assert played.best == grid.best.candidate
        assert played.num_out_of_memory == 0
        assert len(played.trials) <= 8


def test_a_recording_goes_on_where_it_was_ended_and_repeats_only_what_may_be_the_best(
    load: Any, tmp_path: Path
) -> None:
    recorder, grids, benchmark = load("record_dsat_grid"), load("dsat_grid"), load("dsat")
    candidates = recorder.grid()[:4]
    rates = ([10.0, 10.1, 10.05], [9.0, 11.0, 10.0], [3.0, 4.0, 5.0], [10.0, 10.2])
    path = tmp_path / "grid.json"
    known = {"num_params": 1e6, "activation_bytes_per_record": 1e3, "peak_bytes": 1e8, "forward": 5.0}
    lines = [{"machine": {"machine_flops_per_s": 1e9}}]
    for candidate, values in zip(candidates, rates, strict=True):
        for number, value in enumerate(values):
            metrics = {"throughput": value, "latency": 16e6 / value, **({} if number else known)}
            lines.append({"key": json.dumps(candidate.to_json(), sort_keys=True), "metrics": metrics})
    Path(f"{path}.part").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"key": "cut o')

    recording = recorder.Recording(path, candidates, 1.0)
    recording.write()
    grid = grids.RecordedGrid.read(path)
    ground = grid.ground(0)
    told = [ground.outcome(candidates[0]).metrics for _ in range(3)]

    keys = list(recording.keys)
    assert recording.left(0, 3) == []
    assert recording.left(2, 3) == [keys[3]]
    assert recording.left(3, 3) == [keys[1]]
    assert [len(row.repeats) for row in grid.rows] == [3, 3, 3, 2]
    assert grid.rows[0].low == 10.0
    assert grid.rows[0].high == 10.1
    assert all(metrics["forward"] == 5.0 for metrics in told)
    assert ["machine_flops_per_s" in metrics for metrics in told] == [True, True, False]
    assert "repeats: 2 to 3" in grid.flatness
    case = benchmark.GridCase(grid, grids.inputs_path(path))
    assert case.at(0)[0].inputs.runs == {}
    inputs = PredictInputs(described_by="fake tensors", notes=("said",))
    grids.inputs_path(path).write_text(json.dumps(inputs.to_json()))
    assert benchmark.GridCase(grid, grids.inputs_path(path)).at(0)[0].inputs.notes == ("said",)
