"""Play dsat's search methods on formula surfaces or on a recorded grid, and print a table per case.

Usage::

    python benchmarks/dsat.py [--seeds 30] [--first-seed 0] [--methods ...] [--workloads 0 1 ...] [--formulas other]
        [--thorough] [--json FILE]
    python benchmarks/dsat.py --grid benchmarks/dsat_recorded/grid.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dsat_grid import RecordedGrid
from dsat_surfaces import FORMULAS, WORKLOADS, Grid, Surface

from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.core.outcome import TIE, Failure, Measured, Outcome, relative_gain
from dstrial.dsat.methods import search_method
from dstrial.dsat.methods.base import Finish, Measure, MethodOptions
from dstrial.dsat.predictor.inputs import PredictInputs
from dstrial.dsat.space import Space

METHODS = ("predict", "asha", "binary", "random", "oracle")
"""``oracle`` measures the configurations that are best by the formulas with their hidden constants."""
DRY_RUNS = Path(__file__).resolve().parent / "dsat_dry_runs"
CLOSE = 0.97
MAX_TRIALS = 64  # dsat's default of --max-trials
ORACLE_TRIALS = 14  # as many as predict needs in the median
LAUNCH_S, REBUILD_S = 60.0, 10.0  # until the first step: of a launched trial, of an engine in a living worker
NUM_STEPS = 14  # of a measurement: one to count, warm-up, windows, three for the phases
UNTIL_FAILURE_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A space, a surface or grid that answers for it, and the throughput of its best configuration."""

    space: Space
    ground: Any
    slots: int
    inputs: PredictInputs
    best: float
    likely: tuple[Candidate, ...] = ()  # the oracle's choice


def problems(args: argparse.Namespace) -> Iterator[tuple[str, Iterator[tuple[int, Problem]]]]:
    """Yield the name of each case, and its problem of each seed."""
    if args.grid is not None:
        yield "recorded grid", ((seed, grid_problem(args.grid, seed)) for seed in range(args.seeds))
        return
    for number in args.workloads:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        has_oracle = "oracle" in args.methods
        yield (
            WORKLOADS[number].name,
            surface_problems(number, seeds, args.formulas, ORACLE_TRIALS if has_oracle else 0),
        )


def surface_problems(
    number: int, seeds: Sequence[int], formulas: str = "usual", num_likely: int = 0
) -> Iterator[tuple[int, Problem]]:
    workload = WORKLOADS[number]
    space = workload.space()
    grid = Grid(workload, space)
    inputs = read_inputs(DRY_RUNS / f"{number}-fixed.json")
    for seed in seeds:
        ground = Surface(workload, seed, FORMULAS[formulas])
        (best,) = ground.ranked(grid)
        ranked = ground.by_formulas().ranked(grid, num_likely) if num_likely else []
        likely = tuple(one.candidate for one in ranked)
        yield seed, Problem(space, ground, workload.machine.num_ranks, inputs, best.throughput, likely)


def grid_problem(path: Path, seed: int) -> Problem:
    grid = RecordedGrid.read(path)
    known = read_inputs(path.with_name(f"{path.stem}-inputs.json"))
    inputs = dataclasses.replace(known, capacity_bytes=grid.cap_bytes, is_cpu=True)
    return Problem(grid.space, grid.ground(seed), int(grid.header["ranks"]), inputs, grid.best.throughput)


def read_inputs(path: Path) -> PredictInputs:
    return PredictInputs.from_json(json.loads(path.read_text(encoding="utf-8")))


def play(
    problem: Problem, name: str, seed: int, *, thorough: bool = False
) -> list[tuple[Candidate, Outcome, float]]:
    """Return each trial of a search: its configuration, its outcome, its seconds on all slots."""
    return searched(problem, name, seed, thorough=thorough)[0]


def searched(
    problem: Problem, name: str, seed: int, *, thorough: bool = False
) -> tuple[list[tuple[Candidate, Outcome, float]], Mapping[int, Mapping[str, Any]]]:
    """Return the trials of a search as :func:`play` does, and the predictions of each."""
    space = problem.space
    trials: list[tuple[Candidate, Outcome, float]] = []
    if name == "oracle":
        return [(one, problem.ground.outcome(one), 0.0) for one in problem.likely], {}
    options = MethodOptions("throughput", MAX_TRIALS, random_seed=seed, thorough=thorough)
    method = search_method(name, space, options, problem.inputs)
    waiting, is_living = [], False
    actions = method.start()
    while True:
        waiting += [action for action in actions if isinstance(action, Measure)]
        if not waiting or any(isinstance(action, Finish) for action in actions):
            return trials, method.forecasts
        measure = waiting.pop(0)
        outcome = problem.ground.outcome(measure.candidate)
        is_measured = isinstance(outcome, Measured)
        steps_s = NUM_STEPS * outcome.metrics["latency"] * 1e-6 if is_measured else UNTIL_FAILURE_S
        trials.append((measure.candidate, outcome, steps_s + (REBUILD_S if is_living else LAUNCH_S)))
        # Ranks are respawned after an out-of-memory error; only predict's worker lives on.
        is_living = name == "predict" and is_measured
        actions = method.on_result(measure.trial_id, outcome)


def surprises(
    trials: Sequence[tuple[Candidate, Outcome, float]], forecasts: Mapping[int, Mapping[str, Any]]
) -> list[float]:
    """Return by how many predicted standard deviations each log time after the first misses."""
    found = []
    for trial_id, (_, outcome, _) in enumerate(trials, 1):
        forecast = forecasts.get(trial_id)
        if trial_id > 1 and forecast is not None and isinstance(outcome, Measured):
            spread = math.hypot(forecast["spread"], outcome.metrics.get("half_width", 0.0) / 1.96)
            found.append(math.log(outcome.metrics["latency"] / 1e6 / forecast["step_s"]) / spread)
    return found


def best_of(trials: Sequence[tuple[Candidate, Outcome, float]]) -> Candidate | None:
    """Return what dsat would return: the user's own configuration unless another is better by more than a tie."""
    values: dict[Candidate, list[float]] = {}
    for candidate, outcome, _ in trials:
        if isinstance(outcome, Measured):
            values.setdefault(candidate, []).append(outcome.metrics["throughput"])
    scored = [(statistics.mean(many), candidate) for candidate, many in values.items()]
    if not scored:
        return None
    value, best = max(scored, key=lambda pair: pair[0])
    own = next(((worth, candidate) for worth, candidate in scored if candidate.is_own), None)
    return own[1] if own is not None and relative_gain(value, own[0]) <= TIE else best


def line(
    problem: Problem,
    trials: Sequence[tuple[Candidate, Outcome, float]],
    forecasts: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return what is kept of one search."""
    worths = [problem.ground.throughput(candidate) or 0.0 for candidate, _, _ in trials]
    best = best_of(trials)
    returned = 0.0 if best is None else problem.ground.throughput(best) or 0.0
    failures = [outcome.kind for _, outcome, _ in trials if isinstance(outcome, Failure)]
    return {
        "trials": len(trials),
        "out_of_memory": sum(kind.is_out_of_memory for kind in failures),
        "device_s": sum(seconds for _, _, seconds in trials) * problem.slots,
        "first_close": next((n for n, worth in enumerate(worths, 1) if worth >= CLOSE * problem.best), None),
        "gap": max(1 - returned / problem.best, 0.0),
        "surprises": surprises(trials, forecasts),
    }


def table(lines: Sequence[dict[str, Any]]) -> str:
    rows = [
        "| method | searches | returned within 3 % of the best | trials until one is, median | all trials, median "
        "| out of memory | final gap, mean | worst | in 80 % and 95 % intervals "
        "| device-hours of a search, median |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in dict.fromkeys(one["method"] for one in lines):
        mine = [one for one in lines if one["method"] == method]
        never = float("inf")
        first = statistics.median_low(
            never if one["first_close"] is None else one["first_close"] for one in mine
        )
        num_close = sum(one["gap"] <= 1 - CLOSE for one in mine)
        trials = sum(one["trials"] for one in mine)
        off = [abs(number) for one in mine for number in one["surprises"]]
        covered = " / ".join(
            f"{sum(number <= limit for number in off) / max(len(off), 1):.0%}" for limit in (1.28, 1.96)
        )
        rows.append(
            f"| {method} | {len(mine)} | {num_close / len(mine):.0%} | {'never' if first == never else first} "
            f"| {statistics.median(one['trials'] for one in mine):g} "
            f"| {sum(one['out_of_memory'] for one in mine) / trials:.1%} "
            f"| {statistics.mean(one['gap'] for one in mine):.1%} | {max(one['gap'] for one in mine):.1%} "
            f"| {covered if off else ''} "
            f"| {statistics.median(one['device_s'] for one in mine) / 3600:.1f} |"
        )
    return "\n".join(rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--formulas", choices=tuple(FORMULAS), default="usual")
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:4])
    parser.add_argument("--workloads", type=int, nargs="*", default=list(range(len(WORKLOADS))))
    parser.add_argument("--grid", type=Path, help="a recorded grid, in place of the surfaces")
    parser.add_argument("--json", type=Path, help="also write a line of JSON per search to this file")
    args = parser.parse_args(words)
    every: list[dict[str, Any]] = []
    for name, seeds in problems(args):
        found = []
        for seed, problem in seeds:
            for method in args.methods:
                played = line(problem, *searched(problem, method, seed, thorough=args.thorough))
                found.append({"case": name, "method": method, "seed": seed, **played})
        print(f"### {name}\n\n{table(found)}\n", flush=True)
        every += found
    if len({one["case"] for one in every}) > 1:
        print(f"### all cases\n\n{table(every)}")
    if args.json is not None:
        args.json.write_text("".join(json.dumps(one) + "\n" for one in every), encoding="utf-8")


if __name__ == "__main__":
    main()
