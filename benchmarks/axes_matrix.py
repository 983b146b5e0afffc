"""Train, resume and reshape every axis with every optimizer, kind of parameters and loader; write a table.

Usage: ``python benchmarks/axes_matrix.py [--axes dp,pp,tp,sp,ep,autoep]``

Every cell is a trial on two gloo ranks. It trains ``BATCHES`` batches and saves at half of them. Its losses are compared with
those of the same trial on one rank. Then it is resumed from its checkpoint: in the same layout, and in another ZeRO stage on one
rank (without the axis) and on four. A cell is right if losses differ by rounding only, and after a resume in the same layout not
at all; or if it is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from axes_trial import RANKS, AxisTrial, Cell

import dstrial
from dstrial.errors import DstrialError
from dstrial.ranks.process_group import without_compiled_collectives
from dstrial.testing.ranks import run_function

BATCHES = 8
TOLERANCE = 2e-5  # relative; of losses that differ by the order of additions
MUON_TOLERANCE = (
    2e-3  # DeepSpeed's Muon orthogonalizes in float16 on CPUs; in float32 losses differ by at most 2e-7
)
AXES = ("dp", "pp", "tp", "sp", "ep", "autoep")
COLUMNS = ("trained", "resumed", "on 1 rank", "on 4 ranks")
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}  # Muon would compile C++ for a minute in every rank


def cells(axis: str) -> Iterator[Cell]:
    """Yield each ZeRO stage with each optimizer, then one stage with the other parameters and loaders."""
    for stage, optimizer in itertools.product(range(4), ("Adam", "AdamW", "Muon", "client")):
        yield Cell(axis, stage, optimizer)
    stage = 0 if axis == "pp" else 1
    yield from (Cell(axis, stage, parameters=kind) for kind in ("frozen", "LoRA"))
    yield from (Cell(axis, stage, loader=kind) for kind in ("iterable", "stateful"))


def train_all(
    folder: str, runs: list[tuple[str, dict[str, Any], str | None]]
) -> dict[str, list[float] | str]:
    """Train each run: (name, fields of its cell, name of the run that it resumes or None).

    Returns:
        Name -> the losses, or the line of an error.

    Ranks: all, collectively.
    """
    with without_compiled_collectives(is_cpu=True):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    exp_conf = {"searcher": {"name": "single", "metric": "eval"}, "reproducibility": {"experiment_seed": 3}}
    found: dict[str, list[float] | str] = {}
    for name, fields, resumed in runs:
        cell, run = Cell(**fields), pathlib.Path(folder, name)
        setup = {"hparams": {"deepspeed_config": cell.config()}, "exp_conf": exp_conf, "run_dir": run}
        start = None if resumed is None else checkpoint_of(pathlib.Path(folder, resumed))
        try:
            with dstrial.init(**setup, latest_checkpoint=start) as context:
                dstrial.Trainer(AxisTrial(context, cell), context).fit(
                    max_length=dstrial.Batch(BATCHES), reporting_period=dstrial.Batch(1), latest_checkpoint=start,
                    checkpoint_period=dstrial.Batch(BATCHES // 2), checkpoint_policy="none",
                )  # fmt: skip
            rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            found[name] = [row["metrics"]["loss"] for row in rows if row["group"] == "training"]
        except Exception as error:  # noqa: BLE001 - a refusal is a result
            kind = "failed"
            if isinstance(error, DstrialError):
                kind = "refused in the ranks by dstrial"
            elif isinstance(error, (AssertionError, KeyError)):
                kind = "refused in the ranks by DeepSpeed"
            text = re.sub(r"/\S*dstrial-axes-.*?/checkpoints/\S+", "C", str(error))
            found[name] = f"{kind}: {text}".split("; engine 0: parameter")[0].splitlines()[0]
        torch.distributed.barrier()
    return found


def checkpoint_of(run: pathlib.Path) -> str | None:
    """Return the directory of a run's checkpoint at half of its batches; None if it has none."""
    marks = run.glob("checkpoints/*/COMPLETE")
    half = [mark for mark in marks if json.loads(mark.read_text())["steps_completed"] == BATCHES // 2]
    return str(half[0].parent) if half else None


# ---- the matrix ----------------------------------------------------------------------------------------


def run(chosen: list[Cell]) -> Iterator[dict[str, Any]]:
    """Yield one record per cell, all of one axis: the cell, and by column the largest difference or a message."""
    tried = [cell for cell in chosen if cell.refusal() is None]
    # Processes of their own for each number of ranks: DeepSpeed's groups are global.
    plans = {
        RANKS: [(cell.name, cell, None) for cell in tried]
        + [(f"resumed {cell.name}", cell, cell.name) for cell in tried],
        1: [(one.name, one, None) for one in {cell.on_one_rank() for cell in tried}]
        + [(f"on 1 rank {cell.name}", cell.reshaped(1), cell.name) for cell in tried],
        2 * RANKS: [(f"on 4 ranks {cell.name}", cell.reshaped(2 * RANKS), cell.name) for cell in tried],
    }
    losses: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="dstrial-axes-") as folder:
        for ranks, runs in plans.items():
            print(f"{chosen[0].axis}: {len(runs)} runs on {ranks} ranks", file=sys.stderr, flush=True)
            given = [(name, dataclasses.asdict(cell), resumed) for name, cell, resumed in runs]
            results = run_function(train_all, ranks, folder, given, deadline_s=3600, env=NO_COMPILER)
            losses |= results[0].value
    for cell in chosen:
        whole = losses.get(cell.name)
        record = {"cell": cell, "trained": cell.refusal()}
        if whole is not None:
            record["trained"] = difference(whole, losses[cell.on_one_rank().name])
        if isinstance(whole, list):
            half = whole[BATCHES // 2 :]
            record |= {key: difference(losses[f"{key} {cell.name}"], half) for key in COLUMNS[1:]}
        yield record


def difference(losses: list[float] | str, expected: list[float] | str) -> float | str:
    """Return the largest relative difference of a loss, or the message."""
    if isinstance(losses, str) or isinstance(expected, str):
        return losses if isinstance(losses, str) else str(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def is_right(record: dict[str, Any]) -> bool:
    """Whether each comparison is equal or refused."""
    tolerance = MUON_TOLERANCE if record["cell"].optimizer == "Muon" else TOLERANCE
    return all(
        not value.startswith("failed") if isinstance(value, str) else value <= tolerance * (key != "resumed")
        for key, value in record.items()
        if key in COLUMNS
    )


def table(records: list[dict[str, Any]]) -> str:
    """Return Markdown: a row per cell; messages are numbered below, and a row that is wrong ends with ``!``."""
    lines = [f"| axis | stage | optimizer | parameters | loader | {' | '.join(COLUMNS)} |", "|---" * 9 + "|"]
    notes: dict[str, int] = {}
    for record in records:
        shown = [str(value) for value in dataclasses.astuple(record["cell"])[:5]]
        for value in (record.get(key, "") for key in COLUMNS):
            if isinstance(value, str):
                shown.append(f"[{notes.setdefault(value, len(notes) + 1)}]" if value else "")
            else:
                shown.append(f"{value:.0e}" if value else "equal")
        lines.append(f"| {' | '.join(shown)} |{'' if is_right(record) else ' !'}")
    return "\n".join([*lines, "", *(f"{number}. {text}" for text, number in notes.items())])


def main(arguments: list[str] | None = None) -> int:
    """Run the matrix and print it; 1 if a cell trains or resumes otherwise, or fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--axes", default=",".join(AXES), help=f"(default: {','.join(AXES)})")
    began_s = time.monotonic()
    axes = parser.parse_args(arguments).axes.split(",")
    records = [record for axis in axes for record in run(list(cells(axis)))]
    num_right = sum(map(is_right, records))
    print(table(records))
    print(f"\n{num_right} of {len(records)} cells right, in {time.monotonic() - began_s:.0f} s")
    return int(num_right < len(records))


if __name__ == "__main__":
    sys.exit(main())
