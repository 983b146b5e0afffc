"""Predicted against real peak memory of DeepSpeed engines, and what a dry run of a large model costs.

Every engine is built and trained for three steps in a forked process of its own, on one or two real gloo ranks or as rank 0 of
8 or 64 virtual ones; torch's profiler says how many bytes were allocated at once at most. Predictions come from
dry runs of the same configuration with fake tensors at micro batch sizes 2 and 4.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dstrial.engine.dryrun.process import dry_run
from dstrial.engine.dryrun.values import DryRunRequest, DryRunResult

SMALL = {"num_layers": 4, "width": 256, "vocabulary": 4096, "sequence_length": 128}
MEDIUM = {"num_layers": 8, "width": 512, "vocabulary": 2048, "sequence_length": 128}
BILLIONS_7 = {"num_layers": 34, "width": 4096, "vocabulary": 32_000, "sequence_length": 2048}
BILLIONS_70 = {"num_layers": 86, "width": 8192, "vocabulary": 32_000, "sequence_length": 2048}

_DEADLINE_S = 300.0
_NUM_ATTEMPTS = 3  # another process may take the port first
_MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One configuration.

    Attributes:
        stage: ZeRO stage.
        world_size: ranks; 1 and 2 are real, more are virtual.
        micro_batch_size: at which it is measured.
        accumulation: micro batches to a step.
        precision: ``bf16`` or ``fp32``.
        offload: what is on the host: nothing, ``optimizer`` or ``both``.
        bucket: elements of the reduce and the allgather bucket.
        overlap: DeepSpeed's overlap_comm; None for its default.
        shape: of the model.
        checkpoints: whether activations are recomputed.
    """

    stage: int
    world_size: int
    micro_batch_size: int
    accumulation: int = 1
    precision: str = "bf16"
    offload: str = ""
    bucket: int = 1_000_000
    overlap: bool | None = None
    shape: str = "small"
    checkpoints: bool = False

    def model_shape(self) -> dict[str, Any]:
        """Return the arguments of the model."""
        return {**{"small": SMALL, "medium": MEDIUM}[self.shape], "checkpoints": self.checkpoints}

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed config without micro batch size."""
        return deepspeed_config(
            self.stage, self.accumulation, self.precision, self.offload, self.bucket, self.overlap
        )

    def structure(self) -> Row:
        """Return what a dry run is made for: everything but the micro batch size."""
        return dataclasses.replace(self, micro_batch_size=0)


def deepspeed_config(
    stage: int,
    accumulation: int = 1,
    precision: str = "bf16",
    offload: str = "",
    bucket: int = 500_000_000,
    overlap: bool | None = None,
    *,
    torch_adam: bool = True,
) -> dict[str, Any]:
    """Return a DeepSpeed config; see ``Row`` for the arguments."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if overlap is not None:
        zero["overlap_comm"] = overlap
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if offload == "both":
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": torch_adam and not offload}},
        "zero_optimization": zero,
        "bf16": {"enabled": precision == "bf16"},
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 1_000_000_000,
    }


def rows() -> list[Row]:
    """Return the configurations of the table."""
    found = [
        Row(stage, world_size, micro_batch_size)
        for world_size in (1, 2, 8, 64)
        for stage in (0, 1, 2, 3)
        for micro_batch_size in (1, 8)
    ]
    found += [Row(stage, size, 4, offload="optimizer") for size in (1, 2, 8, 64) for stage in (1, 2, 3)]
    found += [Row(3, size, 4, offload="both") for size in (1, 2, 8, 64)]
    found += [Row(stage, 8, 6, accumulation=4) for stage in (0, 1, 2, 3)]
    found += [Row(stage, 2, 3, accumulation=2) for stage in (1, 2, 3)]
    found += [Row(stage, 8, 4, precision="fp32") for stage in (0, 1, 2, 3)]
    found += [Row(stage, 2, 4, overlap=True, bucket=3_000_000) for stage in (1, 2)]
    found += [Row(stage, 8, 2, bucket=50_000_000) for stage in (1, 2, 3)]
    found += [Row(stage, 8, 8, checkpoints=True) for stage in (2, 3)]
    found += [Row(stage, 8, 4, shape="medium") for stage in (0, 1, 2, 3)]
    found += [Row(stage, 64, 8, shape="medium") for stage in (2, 3)]
    return found


def prepare_to_fork() -> None:
    """Import everything once; what DeepSpeed imports only when an engine is made, without torch's compiler and its threads."""
    bypass = importlib.import_module("dstrial.engine.dryrun.patches")
    with bypass.without_compiler():
        for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3"):
            importlib.import_module(name)
    for name in ("dstrial.engine.dryrun.measure", "dsat_memory_real"):
        importlib.import_module(name)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a forked process, quietly, and return its value.

    Raises:
        RuntimeError: the process failed or took too long.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(writer, function, args))
    child.start()
    writer.close()
    value = reader.recv() if reader.poll(_DEADLINE_S) else RuntimeError(f"no answer in {_DEADLINE_S:g} s")
    child.kill()
    child.join()
    if isinstance(value, Exception):
        raise RuntimeError(str(value))
    return value


def _answer(writer: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    try:
        writer.send(function(*args))
    except Exception as error:  # noqa: BLE001  # told to the parent
        writer.send(RuntimeError(f"{type(error).__name__}: {error}"))
    os._exit(0)


def real_peak(row: Row) -> int:
    """Return the peak of rank 0, bytes."""
    from dsat_memory_real import peak_bytes

    asked = (row.model_shape(), row.config(), row.micro_batch_size, row.world_size)
    if row.world_size > 2:
        return int(in_child(peak_bytes, *asked, True))
    for attempt in range(_NUM_ATTEMPTS):
        try:
            return _peak_of_ranks(row.world_size, asked)
        except RuntimeError as error:
            if attempt == _NUM_ATTEMPTS - 1:
                raise
            print(f"again, after {error}: {row}", file=sys.stderr, flush=True)
    raise AssertionError


def _peak_of_ranks(world_size: int, asked: tuple[Any, ...]) -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    others = [
        multiprocessing.get_context("fork").Process(target=_rank, args=(rank, world_size, port, asked))
        for rank in range(1, world_size)
    ]
    for other in others:
        other.start()
    try:
        return int(in_child(_rank, 0, world_size, port, asked))
    finally:
        for other in others:
            other.kill()
            other.join()


def _rank(rank: int, world_size: int, port: int, asked: tuple[Any, ...]) -> int:
    from dsat_memory_real import peak_bytes

    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_SIZE": world_size,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    if rank:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    return peak_bytes(*asked, False)


def request(
    shape: dict[str, Any], config: dict[str, Any], world_size: int, target: str = "cpu"
) -> DryRunRequest:
    """Return the request of a dry run of the benchmark's model."""
    return DryRunRequest(
        workload="dstrial.engine.dryrun.measure:ModelWorkload",
        shared_options={"model": "gpt_model:model", "batch": "gpt_model:batch"},
        options={"shape": shape},
        deepspeed_config=config,
        world_size=world_size,
        target="cuda" if target == "cuda" else "cpu",
        module_paths=(str(Path(__file__).resolve().parent),),
    )


def _dry(asked: DryRunRequest) -> dict[str, Any]:
    from dstrial.engine.dryrun.measure import measure

    return measure(asked).to_json()


def old_formula(row: Row, result: DryRunResult) -> float:
    """Return what Determined's autotuner and DeepSpeed's would expect, bytes.

    Source: both count 4 bytes for parameters, 4 for gradients and 8 for the optimizer where fp16 is off, divide by
    ZeRO stage, and add what one forward pass leaves per record.
    """
    divide = [row.world_size if row.stage >= stage else 1 for stage in (3, 2, 1)]
    state = sum(size * result.parameters / by for size, by in zip((4, 4, 8), divide, strict=True))
    activation = max(phase.lines[-1].per_record for phase in result.device.phases if phase.phase == "forward")
    return state + activation * row.micro_batch_size


def compare(chosen: Sequence[Row], kept: Path | None) -> list[dict[str, Any]]:
    """Return one line per row: the row, real, predicted and old prediction in bytes, and the phase of the peak.

    Args:
        chosen: the rows.
        kept: file of JSON lines with rows that were measured before, to which the others are added; None keeps nothing.
    """
    prepare_to_fork()
    forms: dict[Row, DryRunResult] = {}
    lines = []
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept and kept.exists() else []
    for idx, row in enumerate(chosen):
        fields = dataclasses.asdict(row)
        before = [line for line in known if all(line[name] == value for name, value in fields.items())]
        if before:
            lines.append(before[0])
            continue
        structure = row.structure()
        if structure not in forms:
            asked = request(row.model_shape(), row.config(), row.world_size)
            forms[structure] = DryRunResult.from_json(in_child(_dry, asked))
        result = forms[structure]
        real = real_peak(row)
        size = row.micro_batch_size
        line = {
            **fields,
            "real_bytes": real,
            "predicted_bytes": result.device.peak(size),
            "old_formula_bytes": old_formula(row, result),
            "phase": result.device.peak_phase(size),
            "is_linear": result.is_linear,
        }
        lines.append(line)
        if kept:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        error = line["predicted_bytes"] / real - 1
        print(f"{idx + 1}/{len(chosen)} {error:+.2%} {row}", file=sys.stderr, flush=True)
    return lines


def costs() -> list[dict[str, Any]]:
    """Return time and memory of dry runs of large models, each in its own interpreter."""
    lines = []
    for name, shape, world_size in (("7 B", BILLIONS_7, 8), ("70 B", BILLIONS_70, 64)):
        for stage in (2, 3):
            config = deepspeed_config(stage, torch_adam=False)
            cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started_s = time.monotonic()
            result = dry_run(request(shape, config, world_size, "cuda"), deadline_s=3600)
            wall_s = time.monotonic() - started_s
            cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
            lines.append(
                {
                    "model": name,
                    "world_size": world_size,
                    "stage": stage,
                    "parameters": result.parameters,
                    "wall_s": wall_s,
                    "cpu_s": cpu.ru_utime + cpu.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime,
                    "peak_rss_bytes": result.peak_rss_bytes,
                    "load_average": os.getloadavg()[0],
                    "peak_gib": {size: result.device.peak(size) / 2**30 for size in (1, 4)},
                }
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def summary(lines: Sequence[dict[str, Any]], key: str) -> tuple[float, float, float]:
    """Return mean absolute error, mean error and the error of greatest size, relative to the real peak."""
    errors = [line[key] / line["real_bytes"] - 1 for line in lines]
    return statistics.fmean(map(abs, errors)), statistics.fmean(errors), max(errors, key=abs)


def print_tables(lines: Sequence[dict[str, Any]], cost_lines: Sequence[dict[str, Any]]) -> None:
    """Print the results as Markdown."""
    if lines:
        print("| ranks | stage | micro batch | more | real MiB | dry run | old formula | peak in |")
        print("|---|---|---|---|---|---|---|---|")
    for line in lines:
        more = [f"gas {line['accumulation']}"] if line["accumulation"] > 1 else []
        more += [line["precision"]] if line["precision"] != "bf16" else []
        more += [f"offload {line['offload']}"] if line["offload"] else []
        more += [f"bucket {line['bucket'] / 1e6:g}e6"] if line["bucket"] != 1_000_000 else []
        more += ["overlap"] if line["overlap"] else []
        more += ["checkpoints"] if line["checkpoints"] else []
        more += [line["shape"]] if line["shape"] != "small" else []
        kind = "gloo" if line["world_size"] <= 2 else "virtual"
        real = line["real_bytes"]
        print(
            f"| {line['world_size']} {kind} | {line['stage']} | {line['micro_batch_size']} | {', '.join(more)} "
            f"| {real / _MIB:.1f} | {line['predicted_bytes'] / real - 1:+.1%} "
            f"| {line['old_formula_bytes'] / real - 1:+.0%} | {line['phase']} |"
        )
    if lines:
        print(
            f"\n| {len(lines)} configurations | mean absolute error | mean error | worst |\n|---|---|---|---|"
        )
        for name, key in (("dry run", "predicted_bytes"), ("old formula", "old_formula_bytes")):
            absolute, signed, worst = summary(lines, key)
            print(f"| {name} | {absolute:.2%} | {signed:+.2%} | {worst:+.1%} |")
    if cost_lines:
        print(
            "\n| model | virtual ranks | stage | wall s | CPU s | memory MB | load |\n|---|---|---|---|---|---|---|"
        )
        for cost in cost_lines:
            print(
                f"| {cost['model']} | {cost['world_size']} | {cost['stage']} | {cost['wall_s']:.0f} | {cost['cpu_s']:.0f} "
                f"| {cost['peak_rss_bytes'] / 1e6:.0f} | {cost['load_average']:.0f} |"
            )


def main() -> None:
    """Run what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, help="only so many configurations, spread over the list")
    parser.add_argument("--no-costs", action="store_true", help="leave out the dry runs of large models")
    parser.add_argument(
        "--keep", type=Path, help="file that keeps every row; the same command goes on after the last"
    )
    parsed = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["DS_ACCELERATOR"] = "cpu"
    chosen = rows()
    if parsed.rows is not None:
        step = max(len(chosen) // parsed.rows, 1) if parsed.rows else 1
        chosen = chosen[::step][: parsed.rows]
    lines = compare(chosen, parsed.keep) if chosen else []
    cost_lines = [] if parsed.no_costs else costs()
    print_tables(lines, cost_lines)


if __name__ == "__main__":
    main()
