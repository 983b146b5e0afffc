"""Record an exhaustive grid of DeepSpeed configurations, measured with real engines on two gloo ranks.

Usage::

    python benchmarks/record_dsat_grid.py FILE [--rounds 3] [--most-rounds 6] [--configurations N] [--seconds 1.0]

Every configuration of the grid is measured once per round, in an order that is shuffled anew for each; rounds are interleaved,
so that what changes on the machine meanwhile spreads over all configurations. A configuration's interval is that of the
median over its rounds; after ``--rounds`` rounds those whose interval is wider than 3 % either way get up to ``--most-rounds``.
Each measurement runs the Meter of ``dstrial.dsat.trial`` on an engine of its own in living processes, replaced after
30 engines. Peak bytes come from torch's profiler, once per configuration. The same command goes on where it was ended:
``FILE.part`` holds one line per measurement, and FILE is written from it at the end of each round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dstrial.config import ParallelSizes
from dstrial.dsat.candidate import Candidate
from dstrial.dsat.space import Space

RANKS = 2
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
_ENGINES_PER_PROCESS = 30
_DEADLINE_S = 300.0


def grid() -> list[Candidate]:
    """Return every legal configuration, without those that are the same to DeepSpeed."""
    space = Space(BASE, ParallelSizes(RANKS), stages=STAGES, extra=EXTRA)
    found: dict[str, Candidate] = {}
    for stage in STAGES:
        for structure in space.structures(stage):
            for position in range(space.ladder.last + 1):
                candidate = space.candidate(structure, position)
                if space.illegal(candidate) is None:
                    found.setdefault(space.identity(candidate), candidate)
    own = space.own()
    found[space.identity(own)] = own
    return list(found.values())


class Ranks:
    """Two processes that measure what they are told, until one of them fails or they are worn."""

    def __init__(self, max_s: float) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, port, theirs, max_s), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        self.num_measured = 0

    def measure(self, config: dict[str, Any], *, has_peak: bool) -> dict[str, float]:
        """Return the metrics of rank 0, with ``peak_bytes`` if asked for.

        Raises:
            RuntimeError: a rank failed, or took too long.
        """
        self.num_measured += 1
        for pipe in self._pipes:
            pipe.send((config, has_peak))
        answers = []
        for pipe in self._pipes:
            try:
                answers.append(pipe.recv() if pipe.poll(_DEADLINE_S) else "no answer in time")
            except EOFError:
                answers.append("the rank ended")
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return dict(answers[0])

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _rank(rank: int, port: int, pipe: Connection, max_s: float) -> None:
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    import torch

    from dstrial.ranks.process_group import without_compiled_collectives

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with without_compiled_collectives(is_cpu=True):
        while True:
            config, has_peak = pipe.recv()
            try:
                pipe.send(_measured(config, max_s, has_peak=has_peak))
            except Exception as error:  # noqa: BLE001  # told to the one who asked
                pipe.send(f"{type(error).__name__}: {error}")


def _measured(config: dict[str, Any], max_s: float, *, has_peak: bool) -> dict[str, float]:
    import gc

    import gpt_model
    import torch
    from torch.profiler import ProfilerActivity, profile

    from dstrial.dsat.statistics import SamplingLimits
    from dstrial.dsat.trial.engine_probe import probing
    from dstrial.dsat.trial.meter import Meter

    def engine_of() -> Any:
        import deepspeed

        torch.manual_seed(0)
        model = gpt_model.model(**SHAPE)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=json.loads(json.dumps(config))
        )
        return engine

    def step(engine: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(*batch))
            engine.step()

    batch = gpt_model.batch(config["train_micro_batch_size_per_gpu"], **SHAPE)
    metrics: dict[str, float] = {}
    if has_peak:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            engine = engine_of()
            step(engine, batch)
            step(engine, batch)
        metrics["peak_bytes"] = _peak(profiler)
    else:
        engine = engine_of()
    meter = Meter(SamplingLimits(max_s=max_s))
    with probing(meter):
        while not meter.is_done:
            step(engine, batch)
    metrics |= dict(meter.result().metrics)
    engine.destroy()
    del engine, meter
    gc.collect()
    return metrics


def _peak(profiler: Any) -> float:
    """The most bytes alive of those that were allocated meanwhile."""
    alive = most = 0.0
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda one: one.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


def record(args: argparse.Namespace) -> None:
    """Measure what is missing, round by round."""
    part = Path(f"{args.file}.part")
    candidates = grid()
    random.Random(0).shuffle(candidates)
    candidates = candidates[: args.configurations]
    space = Space(BASE, ParallelSizes(RANKS), stages=STAGES, extra=EXTRA)
    keys = {json.dumps(one.to_json(), sort_keys=True): one for one in candidates}
    lines = list(_lines(part))
    ranks: Ranks | None = None
    began_s, count = time.monotonic(), 0
    try:
        for number in range(args.most_rounds):
            done = _by_key(lines, keys)
            left = [
                key
                for key in keys
                if len(done[key]) <= number and (number < args.rounds or _width(done[key]) > _INTERVAL)
            ]
            random.Random(number + 1).shuffle(left)
            for key in left:
                if ranks is not None and ranks.num_measured >= _ENGINES_PER_PROCESS:
                    ranks.close()
                    ranks = None
                ranks = ranks or Ranks(args.seconds)
                has_peak = not any("peak_bytes" in metrics for metrics in done[key])
                try:
                    metrics = ranks.measure(space.config(keys[key]), has_peak=has_peak)
                except RuntimeError as error:
                    print(f"again later, after {error}: {space.describe(keys[key])}", file=sys.stderr)
                    ranks.close()
                    ranks = None
                    continue
                line = {"key": key, "metrics": metrics}
                lines.append(line)
                with part.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                count += 1
            write(args.file, keys, _by_key(lines, keys))
            spent_s = time.monotonic() - began_s
            print(
                f"round {number + 1}: {len(left)} measured, {spent_s / max(count, 1):.1f} s each",
                file=sys.stderr,
            )
    finally:
        if ranks is not None:
            ranks.close()


def write(path: Path, keys: dict[str, Candidate], done: dict[str, list[dict[str, float]]]) -> None:
    """Write the grid as ``dsat_grid.RecordedGrid`` reads it."""
    import torch

    rows = []
    for key, repeats in done.items():
        if not repeats:
            continue
        low, median, high = _interval([metrics["throughput"] for metrics in repeats])
        peak = next(metrics["peak_bytes"] for metrics in repeats if "peak_bytes" in metrics)
        rows.append(
            {
                "candidate": keys[key].to_json(),
                "repeats": repeats,
                "throughput": median,
                "low": low,
                "high": high,
                "peak_bytes": peak,
            }
        )
    if not rows:
        return
    peaks = [row["peak_bytes"] for row in rows]
    first = rows[0]["repeats"][0]
    import deepspeed

    header = {
        "base": BASE,
        "extra": EXTRA,
        "stages": list(STAGES),
        "ranks": RANKS,
        "shape": SHAPE,
        "cap_bytes": min(peaks) + CAP_SHARE * (max(peaks) - min(peaks)),
        "cap": f"{CAP_SHARE:.0%} of the way from the least to the greatest peak",
        "num_params": first["num_params"],
        "activation_bytes_per_record": first["activation_bytes_per_record"],
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__,
        "num_cores": os.cpu_count(),
    }
    path.write_text(json.dumps({"header": header, "rows": rows}, indent=1), encoding="utf-8")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            continue  # the end of a recording that was killed


def _by_key(lines: Sequence[dict[str, Any]], keys: dict[str, Candidate]) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {key: [] for key in keys}
    for line in lines:
        if line["key"] in found:
            found[line["key"]].append(line["metrics"])
    return found


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return low, median and high: 95 % of the medians of samples drawn from the values with replacement (Efron 1979)."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(values, k=len(values))) for _ in range(400))
    return medians[10], statistics.median(values), medians[-11]


def _width(repeats: Sequence[dict[str, float]]) -> float:
    low, median, high = _interval([metrics["throughput"] for metrics in repeats])
    return (high - low) / 2 / median


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most-rounds", type=int, default=6)
    parser.add_argument("--configurations", type=int, help="only so many, drawn from the grid")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each measurement")
    parser.add_argument("--count", action="store_true", help="only say how large the grid is")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DS_ACCELERATOR"] = "cpu"
    if args.count:
        print(len(grid()))
        return
    record(args)


if __name__ == "__main__":
    main()
