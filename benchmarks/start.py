"""Measure what it costs to start training, against bare torchrun with a plain DeepSpeed script.

Usage: ``python benchmarks/start.py [--ranks 1 2] [--repeats N] [--against TREE] [--json FILE]``

Every start is a new process tree. Prints one Markdown table; see the README beside this file for how to read it.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import functools
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import start_model

from dstrial.fork_server.client import ForkedPopen, ForkServer
from dstrial.fork_server.key import key_of

HERE = pathlib.Path(__file__).resolve().parent
BARE = "torchrun, plain DeepSpeed"
OWN = "dstrial.launch, cold"
FORKED = "dstrial.launch, forked"
AGAINST = "dstrial.launch of --against"


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """One start.

    Attributes:
        first_batch_s: seconds from exec of the launcher to the last rank's first batch.
        end_s: seconds until the launcher has ended.
        tree_cpu_s: CPU seconds of the launcher and all ranks, to their end.
        rank_cpu_s: CPU seconds of a rank to its first batch; the most of all ranks.
        rss_mib: memory of a rank at its first batch, MiB; the most of all ranks.
    """

    first_batch_s: float
    end_s: float
    tree_cpu_s: float
    rank_cpu_s: float
    rss_mib: float


def main(words: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind (default: 5)")
    parser.add_argument("--against", type=pathlib.Path, metavar="TREE", help="another checkout of dstrial")
    parser.add_argument("--json", type=pathlib.Path, help="also write every start to this file")
    options = parser.parse_args(words)
    ways = [BARE, *([AGAINST] if options.against else []), OWN, FORKED]
    starts: dict[int, dict[str, list[Start]]] = {}
    for num_ranks in options.ranks:
        found = starts[num_ranks] = {way: [] for way in ways}
        # Turn by turn, so that all of them see the same machine; the first of several warms the disk's cache.
        num_unmeasured = int(options.repeats > 1)
        for turn in range(num_unmeasured + options.repeats):
            for way in ways:
                with tempfile.TemporaryDirectory(prefix="dstrial-start-") as scratch:
                    start = measure(way, num_ranks, pathlib.Path(scratch), options.against)
                if turn >= num_unmeasured:
                    found[way].append(start)
    print(table(starts))
    if options.json:
        written = {
            str(ranks): {way: [dataclasses.asdict(one) for one in those] for way, those in found.items()}
            for ranks, found in starts.items()
        }
        options.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(way: str, num_ranks: int, scratch: pathlib.Path, against: pathlib.Path | None) -> Start:
    """Start one training, and wait for its end.

    Raises:
        RuntimeError: it failed; with the end of its output.
    """
    marks = scratch / "marks"
    marks.mkdir()
    tree = HERE.parent if against is None or way != AGAINST else against.resolve()
    environ = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join([str(tree), str(HERE)]),
        "DSTRIAL_START_MARKS": str(marks),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "DSTRIAL_RUNS_DIR": str(scratch / "runs"),
    }
    # Its imports are not what is measured.
    server = fork_server(tuple(sorted(key_of(environ).items()))) if way == FORKED else None
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with ForkedPopen(
        server,
        command(way, num_ranks, scratch),
        told=refuse,
        env=environ,
        cwd=scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output = process.communicate()[0]
    end_s, after = time.time() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"{way} on {num_ranks} ranks failed:\n{output[-4000:]}")
    ranks = [json.loads((marks / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return Start(
        first_batch_s=max(rank["at_s"] for rank in ranks) - began_s,
        end_s=end_s,
        tree_cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        rank_cpu_s=max(rank["cpu_s"] for rank in ranks),
        rss_mib=max(rank["rss_mib"] for rank in ranks),
    )


@functools.cache
def fork_server(variables: tuple[tuple[str, str], ...]) -> ForkServer:
    """Start the process that is forked, as a master does, and wait until it has imported everything."""
    # What a master learns that this trial imports.
    imports = ["dstrial.launch.imported_ahead", "sklearn.datasets"]
    server = ForkServer.start(dict(variables), imports, log=pathlib.Path(os.devnull))
    atexit.register(server.close)
    while not server.is_ready(1.0):
        pass
    return server


def refuse(reason: str) -> None:
    """Fail where a launcher is not a fork.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"no fork: {reason}")


def command(way: str, num_ranks: int, scratch: pathlib.Path) -> list[str]:
    """Return the command line of a start."""
    if way == BARE:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        return [sys.executable, *torchrun, str(HERE / "start_bare.py")]
    config = scratch / "exp.json"
    config.write_text(
        json.dumps(
            {
                "name": "start",
                "entrypoint": "python3 -m dstrial.launch --trial start_trial:StartTrial",
                "hyperparameters": {"deepspeed_config": start_model.DS_CONFIG},
                "searcher": {
                    "name": "single",
                    "metric": "validation_loss",
                    "max_length": {"batches": start_model.NUM_BATCHES},
                },
                "resources": {"slots_per_trial": num_ranks},
            }
        ),
        encoding="utf-8",
    )
    launch = ["-m", "dstrial.launch", f"--config={config}", f"--context-dir={scratch}"]
    return [sys.executable, *launch, "--trial=start_trial:StartTrial"]


def table(starts: dict[int, dict[str, list[Start]]]) -> str:
    """Return medians as Markdown, each with its share of the baseline's."""
    columns = {
        "first_batch_s": "to the first batch, s",
        "end_s": "to the end, s",
        "rank_cpu_s": "CPU of a rank to its first batch, s",
        "tree_cpu_s": "CPU of all processes, s",
        "rss_mib": "memory of a rank, MiB",
    }
    lines = [
        "| ranks | started by | " + " | ".join(columns.values()) + " |",
        "|" + "---|" * (2 + len(columns)),
    ]
    for num_ranks, found in starts.items():
        for way, those in found.items():
            cells = []
            for column in columns:
                value = statistics.median(getattr(one, column) for one in those)
                baseline = statistics.median(getattr(one, column) for one in found[BARE])
                digits = 0 if column == "rss_mib" else 2
                cells.append(f"{value:.{digits}f}" + ("" if way == BARE else f" ({value / baseline:.2f})"))
            lines.append(f"| {num_ranks} | {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
