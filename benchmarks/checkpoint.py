"""Measure what a checkpoint costs the training loop, and what loading one in another layout costs.

Usage: ``python benchmarks/checkpoint.py [--size MILLIONS] [--saves N] [--ranks N] [--zero-stage S] [--out FILE]``

Prints two Markdown tables; see the README beside this file for how to read them. Runs on CPU ranks of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import checkpoint_ranks

from dstrial.local.run_directory import RunDirectory
from dstrial.testing.ranks import run_function

AIM = 0.2
"""The most that a save should hold the loop, as a share of a bare ``engine.save_checkpoint``."""

FIXED_BUFFER_BYTES = 64 << 20
"""What a reshape may take besides two copies of the largest parameter: scratch, unpickled structure, the allocator."""

RESHAPES = ((2, 1, 1, 3), (2, 3, 1, 1), (1, 0, 2, 2))
"""Ranks and ZeRO stage that saved, ranks and ZeRO stage that load."""

_GIB = 1 << 30
_MIB = 1 << 20


def measure_saving(scratch: pathlib.Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Save a training run's state in three ways; see ``checkpoint_ranks.save_in_three_ways``."""
    directory = RunDirectory.create(
        scratch / "runs", name="benchmark", context_dir=scratch, command=["benchmark"], config={}
    )
    results = run_function(
        checkpoint_ranks.save_in_three_ways,
        arguments.ranks,
        str(directory.path),
        str(scratch),
        arguments.num_parameters,
        arguments.saves,
        arguments.zero_stage,
        deadline_s=3600.0,
    )
    found: dict[str, Any] = results[0].value
    return found


def measure_reshaping(scratch: pathlib.Path, num_parameters: int) -> list[dict[str, Any]]:
    """Save and load in other layouts, and read and write as many bytes."""
    rows = []
    for num_saved, saved_stage, num_now, stage in RESHAPES:
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            path, copies = str(pathlib.Path(directory, "saved")), pathlib.Path(directory, "copies")
            copies.mkdir()
            saved = run_function(
                checkpoint_ranks.save_layout, num_saved, path, num_parameters, saved_stage, deadline_s=1200.0
            )
            layout = saved[0].value
            baseline = checkpoint_ranks.read_and_write(path, str(copies))
            loaded = run_function(
                checkpoint_ranks.load_layout, num_now, path, layout, num_parameters, stage, deadline_s=1200.0
            )
            width = checkpoint_ranks.width(num_parameters)
            extra = max(
                rank.value["peak_bytes"] - max(rank.value["before_bytes"], rank.value["after_bytes"])
                for rank in loaded
            )
            rows.append(
                {
                    "from": f"{num_saved} ranks, ZeRO {saved_stage}",
                    "to": f"{num_now} ranks, ZeRO {stage}",
                    **baseline,
                    "reshape_s": max(rank.value["reshape_s"] for rank in loaded),
                    "extra_bytes": extra,
                    "bound_bytes": 2 * width * width * 4 + FIXED_BUFFER_BYTES,
                }
            )
    return rows


def print_saving(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the table of the ways to save."""
    bare_s = statistics.median(found["bare_s"])
    # The first save also makes the buffer, so that it stands apart.
    ways = [
        ("bare engine.save_checkpoint", bare_s, bare_s),
        ("Determined 0.38.1, store_path", *[statistics.median(found["determined_s"])] * 2),
        ("dstrial, behind the loop", _later(found["held_s"]), _later(found["completed_s"])),
        ("dstrial, first save", found["held_s"][0], found["completed_s"][0]),
    ]
    print(
        f"\n{arguments.size:g} M parameters, ZeRO {arguments.zero_stage}, {arguments.ranks} ranks, "
        f"{found['num_bytes'] / _GIB:.2f} GiB per checkpoint, {len(found['held_s'])} saves, "
        f"load average {os.getloadavg()[0]:.1f}\n"
    )
    print("| save | loop stands still | of bare | complete after |")
    print("|---|---:|---:|---:|")
    for name, held_s, done_s in ways:
        print(f"| {name} | {held_s:.3f} s | {held_s / bare_s:.3f} | {done_s:.2f} s |")
    idle_s, busy_s = (statistics.median(found[key]) for key in ("batch_s", "batch_while_writing_s"))
    print(
        f"\nAim: under {AIM} of bare. A batch takes {idle_s:.3f} s, and {busy_s:.3f} s while a checkpoint is written."
    )


def _later(values: list[float]) -> float:
    return statistics.median(values[1:] or values)


def print_reshaping(rows: list[dict[str, Any]]) -> None:
    """Print the table of reshapes."""
    print("\n| from | to | GiB | reshape | of read + write | read + write | read | extra memory | bound |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        gib = row["num_bytes"] / _GIB
        print(
            f"| {row['from']} | {row['to']} | {gib:.2f} | {row['reshape_s'] / gib:.2f} s/GiB "
            f"| {row['reshape_s'] / row['read_and_write_s']:.2f} | {row['read_and_write_s'] / gib:.2f} s/GiB "
            f"| {row['read_s'] / gib:.2f} s/GiB | {row['extra_bytes'] / _MIB:.0f} MiB | {row['bound_bytes'] / _MIB:.0f} MiB |"
        )
    print(
        "\nExtra memory: the peak of anonymous memory during the load over what the engine holds before or after it, of the rank "
        "with most. Bound: two copies of the largest parameter and a fixed buffer."
    )


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; impossible numbers end the program with a message."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=float, default=100.0, help="parameters, in millions (default 100)")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints to write (default 5)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that save (default 1)")
    parser.add_argument("--zero-stage", type=int, default=0, choices=range(4), help="of the run that saves")
    parser.add_argument("--only", choices=("saving", "reshaping"), help="measure one of the two")
    parser.add_argument(
        "--scratch", type=pathlib.Path, help="directory to write to; a temporary one if left out"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write everything measured as JSON")
    arguments = parser.parse_args(given)
    if arguments.size <= 0 or arguments.saves < 1 or arguments.ranks < 1:
        parser.error("--size, --saves and --ranks are below 1; expected positive numbers. Leave them out.")
    arguments.num_parameters = int(arguments.size * 1e6)
    return arguments


def main(given: list[str] | None = None) -> None:
    """Measure and print."""
    arguments = parse_arguments(given)
    measured: dict[str, Any] = {
        "size": arguments.size,
        "ranks": arguments.ranks,
        "zero_stage": arguments.zero_stage,
    }
    with tempfile.TemporaryDirectory(dir=arguments.scratch, prefix="dstrial-checkpoint-") as directory:
        scratch = pathlib.Path(directory)
        if arguments.only != "reshaping":
            measured["saving"] = measure_saving(scratch, arguments)
            print_saving(measured["saving"], arguments)
        if arguments.only != "saving":
            measured["reshaping"] = measure_reshaping(scratch, arguments.num_parameters)
            print_reshaping(measured["reshaping"])
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
