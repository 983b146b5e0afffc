"""Record an exhaustive grid of DeepSpeed configurations, measured with real engines on two gloo ranks.

Usage::

    python benchmarks/record_dsat_grid.py FILE [--minutes 45] [--rounds 3] [--most-rounds 9] [--configurations N]
        [--seconds 1.0] [--dry-runs-only]

Every configuration of the grid is measured once per round, in an order that is shuffled anew for each; rounds are interleaved,
so that what changes on the machine meanwhile spreads over all configurations. A configuration's interval is that of the
median over its rounds. After ``--rounds`` rounds, while there is time, those are measured again whose interval is wider than
3 % either way and which may be within 3 % of the best; what is surely worse needs no narrower one. No measurement is begun
after ``--minutes``. The first round also takes peak bytes, from torch's profiler, and the times of a step's phases.

Each measurement runs the Meter of ``dstrial.dsat.rank`` on an engine of its own in living processes. The same command goes
on where it was ended: ``FILE.part`` holds one line per measurement, and FILE is written from it at the end of each round.
First of all the space is dry-run as a search does with a user's model; what ``predict`` starts from is kept beside FILE,
in ``FILE-inputs.json`` without the suffix of FILE, where ``dsat.py --grid FILE`` finds it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dsat_grid import CLOSE, inputs_path
from dsat_grid_ranks import RANKS, Ranks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dstrial.config import ParallelDims
from dstrial.dsat.core.candidate import Candidate
from dstrial.dsat.driver.dry_runs import dry_run_space
from dstrial.dsat.predictor.config_groups import ConfigGroups
from dstrial.dsat.space.space import Space, Structure
from dstrial.engine.dryrun.values import DryRunRequest
from dstrial.local.json_files import write_json_atomically

SHAPE = {"num_layers": 4, "width": 256, "vocabulary": 2048, "sequence_length": 32}
BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
    "steps_per_print": 1_000_000_000,
}
STAGES = (0, 1, 2, 3)
_Z = "zero_optimization."
EXTRA: dict[str, list[Any]] = {
    f"{_Z}reduce_bucket_size": [100_000, 5_000_000],
    f"{_Z}allgather_bucket_size": [200_000, 5_000_000],
    f"{_Z}overlap_comm": [False, True],
    f"{_Z}contiguous_gradients": [True],
    f"{_Z}reduce_scatter": [True, False],
    f"{_Z}round_robin_gradients": [False],
    f"{_Z}stage3_prefetch_bucket_size": [50_000, 50_000_000],
    f"{_Z}stage3_param_persistence_threshold": [0, 100_000],
    f"{_Z}stage3_max_live_parameters": [1_000_000_000],
    f"{_Z}stage3_max_reuse_distance": [1_000_000_000],
    f"{_Z}sub_group_size": [1_000_000_000],
    f"{_Z}offload_optimizer.device": ["none"],
    f"{_Z}offload_optimizer.ratio": [1.0],
    f"{_Z}offload_param.device": ["none"],
}
CAP_SHARE = 0.6
"""The byte cap lies so far up between the least and the greatest peak."""

_INTERVAL = 0.03
_ENGINES_PER_PROCESS = 150
_FIRST_COSTS = 2  # a first measurement, in units of a further one
Repeats = dict[str, list[dict[str, float]]]


def space() -> Space:
    """Return what the grid is of."""
    return Space(BASE, ParallelDims(RANKS), stages=STAGES, extra=EXTRA)


def grid() -> list[Candidate]:
    """Return every legal configuration, without those that are the same to DeepSpeed."""
    of = space()
    found: dict[str, Candidate] = {}
    for stage in STAGES:
        for structure in of.structures(stage):
            for position in range(of.batch_size_grid.last + 1):
                candidate = of.candidate(structure, position)
                if of.illegal_reason(candidate) is None:
                    found.setdefault(of.identity(candidate), candidate)
    own = of.own()
    found[of.identity(own)] = own
    return list(found.values())


def dry_run_grid(path: Path) -> None:
    """Dry-run the kinds of structures of the grid at two CPU ranks, and keep what ``predict`` starts from."""
    of = space()

    def request_of(structure: Structure, is_accumulating: bool) -> DryRunRequest:
        candidate = of.candidate(structure, 0 if is_accumulating else of.batch_size_grid.last)
        return DryRunRequest(
            workload="dstrial.engine.dryrun.measure:ModelWorkload",
            shared_options={"model": "gpt_model:model", "batch": "gpt_model:batch"},
            options={"shape": SHAPE},
            deepspeed_config=of.config(candidate),
            world_size=RANKS,
            target="cpu",
            module_paths=(str(Path(__file__).resolve().parent),),
        )

    found = dry_run_space(ConfigGroups(of, is_cpu=True), request_of)
    for key, why in found.failures.items():
        print(f"no dry run of {key}: {why}", file=sys.stderr)
    write_json_atomically(path, found.to_json(), sync=False)
    print(f"{path}: {len(found.runs)} dry runs", file=sys.stderr)


class Recording:
    """What has been measured so far, and the measuring of more.

    Args:
        path: of the grid; ``.part`` is appended to it for the measurements.
        candidates: what is measured.
        max_s: seconds of timed steps of a measurement.
    """

    def __init__(self, path: Path, candidates: Sequence[Candidate], max_s: float) -> None:
        self._path, self._part = path, Path(f"{path}.part")
        self._space, self._max_s = space(), max_s
        self.keys = {json.dumps(one.to_json(), sort_keys=True): one for one in candidates}
        self.done: Repeats = {key: [] for key in self.keys}
        self.machine: dict[str, float] = {}
        for line in _lines(self._part):
            if "machine" in line:
                self.machine = line["machine"]
            elif line["key"] in self.done:
                self.done[line["key"]].append(line["metrics"])
        self._ranks: Ranks | None = None

    def left(self, number: int, least: int) -> list[str]:
        """Return what a round has to measure, in its order.

        Args:
            number: of the round, from 0.
            least: number of rounds in which everything is measured.
        """
        behind = [key for key, repeats in self.done.items() if len(repeats) <= number]
        if number >= least:
            wide = may_be_best(self.done)
            behind = [key for key in behind if key in wide]
        random.Random(number + 1).shuffle(behind)
        return behind

    def measure(self, key: str) -> None:
        """Measure one configuration once more; one that fails is left for the next round, and said."""
        if self._ranks is not None and self._ranks.num_measured >= _ENGINES_PER_PROCESS:
            self.close()
        try:
            if self._ranks is None:
                self._ranks = Ranks(SHAPE, self._max_s)
            if not self.machine:
                self.machine = self._ranks.machine()
                self._append({"machine": self.machine})
            config = self._space.config(self.keys[key])
            metrics = self._ranks.measure(config, is_first=not self.done[key])
        except RuntimeError as error:
            print(f"again later, after {error}: {self._space.describe(self.keys[key])}", file=sys.stderr)
            self.close()
            return
        self.done[key].append(metrics)
        self._append({"key": key, "metrics": metrics})

    def close(self) -> None:
        """End the processes, if there are any."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def write(self) -> None:
        """Write the grid as ``dsat_grid.RecordedGrid`` reads it; nothing while nothing is measured."""
        rows = [_row(self.keys[key], repeats) for key, repeats in self.done.items() if repeats]
        if rows:
            document = {"header": _header(rows, self.machine), "rows": rows}
            write_json_atomically(self._path, document, sync=False)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._part.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def record(args: argparse.Namespace) -> None:
    """Measure what is missing, round by round."""
    candidates = grid()
    random.Random(0).shuffle(candidates)
    recording = Recording(args.file, candidates[: args.configurations], args.seconds)
    until_s = time.monotonic() + 60 * args.minutes
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    try:
        with Progress(*columns, console=Console(stderr=True), speed_estimate_period=300) as progress:
            number_of = len(recording.keys)
            # A first measurement counts twice, for it takes about twice as long.
            total = number_of * (args.rounds - 1 + _FIRST_COSTS)
            spent = sum(
                min(len(repeats), args.rounds) + (_FIRST_COSTS - 1 if repeats else 0)
                for repeats in recording.done.values()
            )
            bar = progress.add_task("round 1", total=total, completed=spent)
            for number in range(args.most_rounds):
                left = recording.left(number, args.rounds)
                if number >= args.rounds:
                    progress.update(bar, total=len(left), completed=0)
                progress.update(bar, description=f"round {number + 1}")
                for key in left:
                    if time.monotonic() > until_s:
                        print(f"{args.minutes:g} minutes are over", file=sys.stderr)
                        return
                    is_first = not recording.done[key]
                    recording.measure(key)
                    progress.advance(bar, _FIRST_COSTS if is_first else 1)
                recording.write()
    finally:
        recording.close()
        recording.write()


def may_be_best(done: Mapping[str, Sequence[Mapping[str, float]]]) -> set[str]:
    """Return the configurations whose interval is too wide to say whether they are within 3 % of the best one."""
    intervals = {key: interval(_throughputs(repeats)) for key, repeats in done.items() if repeats}
    best_low = max((low for low, _, _ in intervals.values()), default=0.0)
    return {
        key
        for key, (low, median, high) in intervals.items()
        if (high - low) / 2 / median > _INTERVAL and high >= CLOSE * best_low
    }


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return low, median and high: 95 % of the medians of samples drawn from the values with replacement (Efron 1979)."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(values, k=len(values))) for _ in range(400))
    return medians[10], statistics.median(values), medians[-11]


def _row(candidate: Candidate, repeats: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    low, median, high = interval(_throughputs(repeats))
    # What only the first repeat has measured does not change from one to the next.
    whole = [{**repeats[0], **metrics} for metrics in repeats]
    return {
        "candidate": candidate.to_json(),
        "repeats": whole,
        "throughput": median,
        "low": low,
        "high": high,
        "peak_bytes": repeats[0]["peak_bytes"],
    }


def _header(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, float]) -> dict[str, Any]:
    import deepspeed
    import torch

    peaks = [row["peak_bytes"] for row in rows]
    first = rows[0]["repeats"][0]
    return {
        "base": BASE,
        "extra": EXTRA,
        "stages": list(STAGES),
        "ranks": RANKS,
        "shape": SHAPE,
        "cap_bytes": min(peaks) + CAP_SHARE * (max(peaks) - min(peaks)),
        "cap": f"{CAP_SHARE:.0%} of the way from the least to the greatest peak",
        "num_params": first["num_params"],
        "activation_bytes_per_record": first["activation_bytes_per_record"],
        "machine": dict(machine),
        "rounds": rounds(rows),
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "num_cores": os.cpu_count(),
    }


def rounds(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each round by how much it was faster than the median of all, as the machine changes meanwhile."""
    most = max(len(row["repeats"]) for row in rows)
    ratios: list[list[float]] = [[] for _ in range(most)]
    for row in rows:
        for number, metrics in enumerate(row["repeats"]):
            ratios[number].append(metrics["throughput"] / row["throughput"])
    return [round(statistics.median(values), 4) for values in ratios]


def _throughputs(repeats: Sequence[Mapping[str, float]]) -> list[float]:
    return [metrics["throughput"] for metrics in repeats]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            yield json.loads(text)
        except ValueError:
            continue  # the end of a recording that was killed


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=45.0, help="no measurement begins later (45)")
    parser.add_argument("--rounds", type=int, default=3, help="in which everything is measured (3)")
    parser.add_argument("--most-rounds", type=int, default=9, help="for what is not known well enough (9)")
    parser.add_argument("--configurations", type=int, help="only so many, drawn from the grid")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timed steps, for each measurement (1)")
    parser.add_argument("--dry-runs-only", action="store_true", help="make what predict starts from, and end")
    parser.add_argument("--count", action="store_true", help="only say how large the grid is")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cpu"
    if args.count:
        print(len(grid()))
        return
    if args.dry_runs_only or not inputs_path(args.file).exists():
        dry_run_grid(inputs_path(args.file))
    if not args.dry_runs_only:
        record(args)


if __name__ == "__main__":
    main()
