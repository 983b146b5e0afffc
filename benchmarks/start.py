"""Measure what it costs to start training, against bare torchrun with a plain DeepSpeed script.

Usage: ``python benchmarks/start.py [--ranks 1 2] [--repeats N] [--master] [--against TREE] [--json FILE]``

Every start is a new process tree, or a fork where the row says so. Prints one Markdown table; see the README beside this file for
how to read it.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
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
from collections.abc import Iterator
from typing import Any

import start_marks
import start_model
from rich.console import Console
from rich.progress import Progress

from dstrial.fork_server import key_of
from dstrial.fork_server.client import ForkServer
from dstrial.fork_server.fork import Program
from dstrial.testing.master import MasterForTest, master_for_test

HERE = pathlib.Path(__file__).resolve().parent
TRIAL = "start_trial:StartTrial"
BARE = "torchrun, plain DeepSpeed"
OWN = "dstrial.launch, cold"
FORKED = "dstrial.launch, forked"
AGAINST = "dstrial.launch of --against"
DET_NEW = "det experiment create, cold"
DET_FORKED = "det experiment create, forked"
_MASTERS = {DET_NEW: "warm: false\n", DET_FORKED: "warm: true\n"}
_DEADLINE_S = 300.0


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    first_batch_s: float  # from exec of the launcher, or of ``det``, to the last rank's first batch
    end_s: float  # until the launcher, or the experiment, has ended
    tree_cpu_s: float | None  # of the launcher and all ranks, to their end; None where a master starts them
    rank_cpu_s: float  # to the first batch, the most of all ranks
    rss_mib: float  # at the first batch, the most of all ranks
    private_mib: float  # the same, of pages that no other process shares


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    num_ranks: int
    way: str


def main(words: list[str] | None = None) -> int:
    options = parse_arguments(words)
    ways = [BARE, *([AGAINST] if options.against else []), OWN, FORKED, *(_MASTERS if options.master else [])]
    # Turn by turn, so that all of them see the same machine; the first of several warms the disk's cache.
    num_unmeasured = int(options.repeats > 1)
    starts: dict[Kind, list[Start]] = {}
    num_starts = len(options.ranks) * (num_unmeasured + options.repeats) * len(ways)
    with Progress(console=Console(stderr=True)) as progress, contextlib.ExitStack() as stack:
        masters = {
            way: stack.enter_context(running_master(setting, max(options.ranks)))
            for way, setting in _MASTERS.items()
            if way in ways
        }
        task = progress.add_task("starting", total=num_starts)
        for num_ranks in options.ranks:
            for turn in range(num_unmeasured + options.repeats):
                for way in ways:
                    progress.update(task, description=f"ranks {num_ranks}: {way}")
                    with tempfile.TemporaryDirectory(prefix="dstrial-start-") as scratch:
                        by = masters.get(way, options.against)
                        start = measure(way, num_ranks, pathlib.Path(scratch), by)
                    progress.advance(task)
                    if turn >= num_unmeasured:
                        starts.setdefault(Kind(num_ranks, way), []).append(start)
    print(table(starts))
    if options.json:
        rows = [
            {**dataclasses.asdict(kind), "starts": [dataclasses.asdict(one) for one in those]}
            for kind, those in starts.items()
        ]
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return 0


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks (default: 1 2)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="starts of each kind (default: 5)")
    parser.add_argument(
        "--master", action="store_true", help="also from `det experiment create` on, on masters of its own"
    )
    parser.add_argument("--against", type=pathlib.Path, metavar="TREE", help="another checkout of dstrial")
    parser.add_argument("--json", type=pathlib.Path, help="also write every start to this file")
    return parser.parse_args(words)


def measure(
    way: str, num_ranks: int, scratch: pathlib.Path, by: MasterForTest | pathlib.Path | None
) -> Start:
    """Start one training through the master, or with the checkout of ``--against``; wait for its end."""
    (scratch / "marks").mkdir()
    (scratch / "context").mkdir()
    if isinstance(by, MasterForTest):
        return measure_on_master(num_ranks, scratch, by)
    tree = by.resolve() if by is not None and way == AGAINST else HERE.parent
    environ = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": os.pathsep.join([str(tree), str(HERE)]),
        "DSTRIAL_START_MARKS": str(scratch / "marks"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "DSTRIAL_RUNS_DIR": str(scratch / "runs"),
    }
    # Its imports are not what is measured.
    server = fork_server(tuple(sorted(key_of(environ).items()))) if way == FORKED else None
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    words, log = command(way, num_ranks, scratch), scratch / "log"
    with log.open("wb") as output:
        if server is None:
            process = subprocess.Popen(
                words, env=environ, cwd=scratch / "context", stdout=output, stderr=output
            )
        else:
            program = Program(words[1:], environ, str(scratch / "context"), has_spare=True)
            process = server.start(program, [0, output.fileno(), output.fileno()])
        process.wait()
    end_s, after = time.time() - began_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"{way} on {num_ranks} ranks failed:\n{log.read_text()[-4000:]}")
    tree_cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return start_of(scratch / "marks", num_ranks, began_s, end_s, tree_cpu_s)


def measure_on_master(num_ranks: int, scratch: pathlib.Path, master: MasterForTest) -> Start:
    """Create an experiment with ``det``, and wait for its end."""
    variables = [f"DSTRIAL_START_MARKS={scratch / 'marks'}", f"PYTHONPATH={HERE}", "OMP_NUM_THREADS=1"]
    path = scratch / "exp.json"
    path.write_text(json.dumps(experiment_config(num_ranks, variables)), encoding="utf-8")
    client = master.client()
    began_s = time.time()
    created = master.det("experiment", "create", str(path), str(scratch / "context"))
    if created.returncode:
        raise RuntimeError(created.stdout + created.stderr)
    while True:
        newest = client.get("/api/v1/experiments?limit=-1")["experiments"][-1]
        if newest["endTime"] is not None:
            break
        if time.time() - began_s > _DEADLINE_S:
            raise RuntimeError(f"experiment {newest['id']} has not ended after {_DEADLINE_S:.0f} s")
        time.sleep(0.02)
    if newest["state"] != "STATE_COMPLETED":
        logs = master.det("experiment", "logs", str(newest["id"])).stdout
        raise RuntimeError(f"experiment {newest['id']} is {newest['state']}:\n{logs[-4000:]}")
    return start_of(scratch / "marks", num_ranks, began_s, time.time() - began_s, None)


def start_of(
    marks: pathlib.Path, num_ranks: int, began_s: float, end_s: float, tree_cpu_s: float | None
) -> Start:
    ranks = [json.loads((marks / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return Start(
        first_batch_s=max(rank["at_s"] for rank in ranks) - began_s,
        end_s=end_s,
        tree_cpu_s=tree_cpu_s,
        rank_cpu_s=max(rank["cpu_s"] for rank in ranks),
        rss_mib=max(rank["rss_mib"] for rank in ranks),
        private_mib=max(rank["private_mib"] for rank in ranks),
    )


@contextlib.contextmanager
def running_master(setting: str, num_slots: int) -> Iterator[MasterForTest]:
    with tempfile.TemporaryDirectory(prefix="dstrial-start-") as name:
        directory = pathlib.Path(name)
        settings = directory / "master.yaml"
        settings.write_text(setting, encoding="utf-8")
        options = ["--config", str(settings)]
        with master_for_test(directory, num_slots=num_slots, options=options) as master:
            yield master


@functools.cache
def fork_server(variables: tuple[tuple[str, str], ...]) -> ForkServer:
    """Start the process that is forked, as a master does, and wait until it has imported everything."""
    names = ["dstrial.launch.imported_ahead"]
    server = ForkServer(dict(variables), names, log=pathlib.Path(os.devnull))
    atexit.register(server.close)
    while not server.is_ready(1.0):
        pass
    return server


def command(way: str, num_ranks: int, scratch: pathlib.Path) -> list[str]:
    if way == BARE:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        return [sys.executable, *torchrun, str(HERE / "start_bare.py")]
    config = scratch / "exp.json"
    config.write_text(json.dumps(experiment_config(num_ranks, [])), encoding="utf-8")
    launch = ["-m", "dstrial.launch", f"--config={config}", f"--context-dir={scratch / 'context'}"]
    return [sys.executable, *launch, "--trial", TRIAL]


def experiment_config(num_ranks: int, variables: list[str]) -> dict[str, Any]:
    return {
        "name": "start",
        "entrypoint": f"python3 -m dstrial.launch --trial {TRIAL}",
        "environment": {"environment_variables": variables},
        "hyperparameters": {"deepspeed_config": start_model.DS_CONFIG},
        "searcher": {
            "name": "single",
            "metric": "validation_loss",
            "max_length": {"batches": start_marks.NUM_BATCHES},
        },
        "resources": {"slots_per_trial": num_ranks},
        "max_restarts": 0,
    }


def table(starts: dict[Kind, list[Start]]) -> str:
    """Return medians as Markdown, each with its share of the baseline's."""
    columns = {
        "first_batch_s": "to the first batch, s",
        "end_s": "to the end, s",
        "rank_cpu_s": "CPU of a rank to its first batch, s",
        "tree_cpu_s": "CPU of all processes, s",
        "rss_mib": "memory of a rank, MiB",
        "private_mib": "private, MiB",
    }
    lines = [
        "| ranks | started by | " + " | ".join(columns.values()) + " |",
        "|" + "---|" * (2 + len(columns)),
    ]
    for kind, those in starts.items():
        bare = starts[dataclasses.replace(kind, way=BARE)]
        cells = [_cell(kind, those, bare, column) for column in columns]
        lines.append(f"| {kind.num_ranks} | {kind.way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(kind: Kind, those: list[Start], bare: list[Start], column: str) -> str:
    values: list[Any] = [getattr(one, column) for one in those]
    if None in values:
        return "-"
    digits = 0 if column.endswith("mib") else 2
    value, baseline = statistics.median(values), statistics.median(getattr(one, column) for one in bare)
    return f"{value:.{digits}f}" + ("" if kind.way == BARE else f" ({value / baseline:.2f})")


if __name__ == "__main__":
    sys.exit(main())
