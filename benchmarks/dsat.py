"""Search methods of the autotuner and their opponents, played on formula surfaces and on a recorded grid.

Usage::

    python benchmarks/dsat.py --record dsat_played.jsonl [--opponents PYTHON] [--seeds 30] [--batch fixed free]
        [--methods ...] [--workloads 0 1 ...] [--grid FILE] [--dry-runs DIR]
    python benchmarks/dsat.py --record dsat_played.jsonl --show [--markdown FILE] [--plot FILE.svg]

Every search appends one line to ``--record``; searches that are there already are not played again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dsat_grid import CLOSE, RecordedGrid, inputs_path
from dsat_play import Cost, Opponents, Played, Problem, play_ours
from dsat_standings import markdown, plot
from dsat_surface_costs import activation_bytes_per_record
from dsat_surfaces import WORKLOADS, Grid, Surface, Workload

from dstrial.dsat.predictor.profiles import PredictInputs

OURS = (
    "predict",
    "asha",
    "binary",
    "random",
    "asha-no-gates",
    "binary-no-gates",
    "random-no-gates",
    "random-legal",
)
OTHERS = ("optuna", "deepspeed-grid", "deepspeed-random", "deepspeed-model")
DETERMINED = ("determined-asha", "determined-binary", "determined-random")
"""Cannot keep the global batch, so they are played with a free one only."""


def problems(args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, kind of batch, case)."""
    if args.grid is not None:
        grid = RecordedGrid.read(args.grid)
        print(f"recorded grid: {grid.flatness}", file=sys.stderr)
        yield "recorded grid", "fixed", GridCase(grid, inputs_path(args.grid))
    for number, batch in itertools.product(args.workloads, args.batch):
        yield WORKLOADS[number].name, batch, SurfaceCase(WORKLOADS[number], batch == "free", args.dry_runs)


class GridCase:
    """A recorded grid with every seed, and the dry runs beside its file, if there are any."""

    def __init__(self, grid: RecordedGrid, inputs: Path) -> None:
        self._grid = grid
        known = PredictInputs(is_cpu=True)
        if inputs.exists():
            known = PredictInputs.from_json(json.loads(inputs.read_text(encoding="utf-8")))
        self._inputs = dataclasses.replace(known, capacity_bytes=grid.cap_bytes, is_cpu=True)

    def at(self, seed: int) -> tuple[Problem, float]:
        """Return the problem of a seed, and its best throughput."""
        header = self._grid.header
        problem = Problem(
            self._grid.space,
            self._grid.ground(seed),
            int(header["ranks"]),
            float(header["num_params"]),
            self._inputs,
            float(header["activation_bytes_per_record"]),
            self._grid.cap_bytes,
        )
        return problem, self._grid.best.throughput

    def is_close(self, problem: Problem, candidate: Any, best: float) -> bool:
        """Whether a configuration is within 3 % of the best, as far as intervals tell."""
        del problem, best
        row = self._grid.row(candidate)
        return row.peak_bytes <= self._grid.cap_bytes and self._grid.is_close(row)


class SurfaceCase:
    """A workload with every seed."""

    def __init__(self, workload: Workload, is_free: bool, dry_runs: Path | None) -> None:
        self._workload = workload
        self._space = workload.space(free_batch=is_free)
        self._grid = Grid(workload, self._space)
        self._inputs = None
        self._best: dict[int, float] = {}
        if dry_runs is not None:
            name = f"{WORKLOADS.index(workload)}-{'free' if is_free else 'fixed'}.json"
            self._inputs = PredictInputs.from_json(json.loads((dry_runs / name).read_text(encoding="utf-8")))

    def at(self, seed: int) -> tuple[Problem, float]:
        """Return the problem of a seed, and its best throughput."""
        if seed not in self._best:
            self._best[seed] = Surface(self._workload, seed).optimum(self._grid).throughput
        surface, workload = Surface(self._workload, seed), self._workload
        problem = Problem(
            self._space,
            surface,
            workload.machine.num_ranks,
            workload.model.num_params,
            self._inputs,
            activation_bytes_per_record(workload) * surface.hidden.activations,
            workload.machine.device_bytes,
        )
        return problem, self._best[seed]

    def is_close(self, problem: Problem, candidate: Any, best: float) -> bool:
        """Whether a configuration is within 3 % of the best."""
        return (problem.ground.throughput(candidate) or 0.0) >= CLOSE * best


def line(problem: Problem, case: Any, best: float, played: Played) -> dict[str, Any]:
    """Return what is kept of one search."""
    spent, first, until_s = 0.0, None, None
    for number, (candidate, _, seconds) in enumerate(played.trials, 1):
        spent += seconds
        if first is None and case.is_close(problem, candidate, best):
            first, until_s = number, spent
    returned = None if played.best is None else problem.ground.throughput(played.best)
    return {
        "trials": len(played.trials),
        "out_of_memory": played.num_out_of_memory,
        "device_s": played.seconds * problem.slots,
        "first_close": first,
        "device_s_until_close": None if until_s is None else until_s * problem.slots,
        "gap": 1.0 if returned is None else max(1 - returned / best, 0.0),
        "best": None if played.best is None else problem.space.describe(played.best),
    }


def play(args: argparse.Namespace) -> None:
    """Play what is not on record yet."""
    known = {(one["case"], one["batch"], one["method"], one["seed"]) for one in read(args.record)}
    opponents = None if args.opponents is None else Opponents(args.opponents)
    cost = Cost()
    with args.record.open("a", encoding="utf-8") as file:
        for name, batch, case in problems(args):
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                left = [one for one in methods(args, batch) if (name, batch, one, seed) not in known]
                if not left:
                    continue
                for method in left:
                    problem, best = case.at(seed)
                    began_s = time.monotonic()
                    if method in OURS:
                        played = play_ours(problem, method, seed, cost)
                    elif opponents is not None:
                        played = opponents.play(problem, method, seed, cost)
                    else:
                        continue
                    found = line(problem, case, best, played)
                    found |= {"case": name, "batch": batch, "method": method, "seed": seed}
                    found["thinking_s"] = round(time.monotonic() - began_s, 2)
                    file.write(json.dumps(found) + "\n")
                    file.flush()
            print(f"{time.strftime('%H:%M:%S')} {name}, {batch} batch: done", file=sys.stderr)
    if opponents is not None:
        opponents.close()


def methods(args: argparse.Namespace, batch: str) -> list[str]:
    """Return which methods are played with a kind of batch."""
    able = (*OURS, *OTHERS, *(DETERMINED if batch == "free" else ()))
    return [name for name in able if not args.methods or name in args.methods]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]


def main() -> None:
    """Play, or show what was played."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--opponents", type=Path, help="python of the opponents' environment")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch", nargs="+", choices=["fixed", "free"], default=["fixed", "free"])
    parser.add_argument("--methods", nargs="+", choices=[*OURS, *OTHERS, *DETERMINED])
    parser.add_argument("--workloads", type=int, nargs="*", default=list(range(len(WORKLOADS))))
    parser.add_argument("--grid", type=Path, help="a recorded grid")
    parser.add_argument(
        "--dry-runs", type=Path, help="directory of predict's inputs, one file per workload and batch"
    )
    parser.add_argument("--show", action="store_true", help="only show what is on record")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if not args.show:
        play(args)
    found = read(args.record)
    text = markdown(found)
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text, encoding="utf-8")
    if args.plot is not None:
        args.plot.write_text(plot(found), encoding="utf-8")


if __name__ == "__main__":
    main()
