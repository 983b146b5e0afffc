"""Measure the embedded master: start of a trial, reports and log lines per second, lists, memory.

Usage: ``python benchmarks/master.py [--repeats N] [--experiments N --trials N --metrics N] [--json FILE]``

Prints one Markdown table; see the README beside this file for how to read it. Starts masters of its own in temporary
directories and on free ports.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import http.client
import json
import multiprocessing
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import psutil
import yaml
from master_filling import fill
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dstrial.testing.master import MasterForTest, master_for_test

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL_DEF = ROOT / "model_defs" / "digits"
HYPERPARAMETERS = {
    "deepspeed_config": "ds_config.json",
    "overwrite_deepspeed_args": {},
    "num_channels": 16,
    "dropout": 0.25,
    "split_seed": 1797,
}
COMMAND = "torchrun --nproc_per_node 1 master_script.py"
DEADLINE_S = 300.0
Row = tuple[str, str, str]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--repeats", type=int, default=5, help="starts of a trial, each way (default: 5; 0 leaves them out)"
    )
    parser.add_argument("--reports", type=int, default=20_000, help="metric reports (default: 20000)")
    parser.add_argument("--clients", type=int, default=8, help="processes that report (default: 8)")
    parser.add_argument("--lines", type=int, default=500_000, help="log lines (default: 500000)")
    parser.add_argument("--experiments", type=int, default=1000, help="stored (default: 1000)")
    parser.add_argument("--trials", type=int, default=10_000, help="stored (default: 10000)")
    parser.add_argument(
        "--metrics", type=int, default=5_000_000, help="stored metric rows (default: 5000000)"
    )
    parser.add_argument("--requests", type=int, default=200, help="of each list (default: 200)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the rows to this file")
    return parser.parse_args(arguments)


def make_context(directory: pathlib.Path) -> pathlib.Path:
    context = directory / "context"
    shutil.copytree(MODEL_DEF, context, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(pathlib.Path(__file__).with_name("master_script.py"), context)
    (context / "hyperparameters.json").write_text(json.dumps(HYPERPARAMETERS))
    return context


def write_config(
    path: pathlib.Path, entrypoint: str, variables: list[str], hyperparameters: dict[str, Any]
) -> pathlib.Path:
    config = {
        "name": path.stem,
        "entrypoint": entrypoint,
        "hyperparameters": hyperparameters,
        "searcher": {"name": "single", "metric": "validation_accuracy", "smaller_is_better": False},
        "max_restarts": 0,
        "environment": {"environment_variables": variables},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def wait_for(path: pathlib.Path) -> float:
    """Return the time that a process writes into a file."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at_s:
        if path.exists() and (text := path.read_text()):
            return float(text)
        time.sleep(0.01)
    raise TimeoutError(f"{path} is not there after {DEADLINE_S} s")


def bare_start(context: pathlib.Path, marker: pathlib.Path, env: dict[str, str]) -> float:
    started_s = time.time()
    subprocess.run(
        COMMAND.split(),
        cwd=context,
        env={**env, "FIRST_BATCH_FILE": str(marker), "DSTRIAL_RUNS_DIR": str(marker.parent / "runs")},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return wait_for(marker) - started_s


def master_start(master: MasterForTest, context: pathlib.Path, marker: pathlib.Path) -> float:
    """Return seconds from ``det experiment create`` to the first batch; waits for the end of the experiment."""
    config = write_config(
        marker.with_suffix(".yaml"),
        COMMAND,
        [f"FIRST_BATCH_FILE={marker}", "OMP_NUM_THREADS=1"],
        HYPERPARAMETERS,
    )
    started_s = time.time()
    created = master.det("experiment", "create", str(config), str(context))
    if created.returncode != 0:
        raise RuntimeError(created.stdout + created.stderr)
    first_s = wait_for(marker) - started_s
    client = master.client()
    while any(
        experiment["endTime"] is None
        for experiment in client.get("/api/v1/experiments?limit=-1")["experiments"]
    ):
        time.sleep(0.1)
    return first_s


def measure_start(directory: pathlib.Path, repeats: int, step: Callable[[], None]) -> list[Row]:
    """Compare the start of a trial through the master with a bare torchrun; the two take turns."""
    context = make_context(directory)
    bin_dir = str(pathlib.Path(sys.executable).parent)
    env = {
        **os.environ,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
    }
    bare, through = [], []
    with master_for_test(directory, num_slots=1) as master:
        for index in range(repeats + 1):
            bare.append(bare_start(context, directory / f"bare{index}", env))
            step()
            through.append(master_start(master, context, directory / f"master{index}"))
            step()
    # The first pair fills the caches of the file system.
    ratios = [b / a for a, b in zip(bare[1:], through[1:], strict=True)]
    text = f"{statistics.median(ratios):.2f} ({statistics.median(through[1:]):.2f} s / {statistics.median(bare[1:]):.2f} s)"
    return [("`det experiment create` to first batch / bare torchrun", text, "under 1.3")]


def report(address: str, token: str, trial_id: int, first: int, count: int) -> None:
    """Send metric reports over one connection, as a trial's session does while it is used as a context."""
    host, _, port = address.rpartition("//")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for index in range(first, first + count):
        metrics = {"avgMetrics": {"loss": 1.0 / (index + 1), "accuracy": 0.5}, "batchMetrics": []}
        body = {"trialId": trial_id, "trialRunId": 0, "stepsCompleted": index, "metrics": metrics}
        connection.request(
            "POST",
            f"/api/v1/trials/{trial_id}/metrics",
            json.dumps({"group": "training", "metrics": body}),
            {"Authorization": f"Bearer {token}"},
        )
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {text.decode()}")
    connection.close()


def paused_trial(master: MasterForTest, directory: pathlib.Path) -> int:
    config = write_config(directory / "reports.yaml", "true", [], {})
    empty = directory / "empty"
    empty.mkdir(exist_ok=True)
    created = master.det("experiment", "create", "--paused", str(config), str(empty))
    if created.returncode != 0:
        raise RuntimeError(created.stdout + created.stderr)
    newest = master.client().get("/api/v1/experiments?limit=-1")["experiments"][-1]["id"]
    return int(master.client().get(f"/api/v1/experiments/{newest}/trials")["trials"][0]["id"])


def measure_reports(
    master: MasterForTest, directory: pathlib.Path, num_reports: int, num_clients: int
) -> list[Row]:
    """Measure metric reports per second from several processes, one trial each."""
    trials = [paused_trial(master, directory) for _ in range(num_clients)]
    token = master.client().token
    each = num_reports // num_clients
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_clients, mp_context=context) as pool:
        list(pool.map(report, *zip(*[(master.address, token, trial, 0, 1) for trial in trials], strict=True)))
        started_s = time.monotonic()
        list(
            pool.map(
                report, *zip(*[(master.address, token, trial, 1, each) for trial in trials], strict=True)
            )
        )
        seconds = time.monotonic() - started_s
    return [
        (
            f"metric reports per second from {num_clients} clients on the same cores",
            f"{each * num_clients / seconds:,.0f}",
            "2,000",
        )
    ]


def measure_lines(master: MasterForTest, directory: pathlib.Path, num_lines: int) -> list[Row]:
    """Measure log lines per second from a trial's output into the database."""
    program = f"import sys; sys.stdout.writelines('[rank=0] INFO: line %d of the log\\n' % i for i in range({num_lines}))"
    context = directory / "printing"
    context.mkdir()
    (context / "printing.py").write_text(program)
    config = write_config(directory / "lines.yaml", "python3 printing.py", [], {})
    created = master.det("experiment", "create", str(config), str(context))
    if created.returncode != 0:
        raise RuntimeError(created.stdout + created.stderr)
    client = master.client()
    while True:
        newest = client.get("/api/v1/experiments?limit=-1")["experiments"][-1]
        if newest["endTime"] is not None:
            break
        time.sleep(0.05)
    trial = client.get(f"/api/v1/experiments/{newest['id']}/trials")["trials"][0]
    import sqlite3

    with sqlite3.connect(master.state.database_path) as connection:
        stored = connection.execute(
            "SELECT COUNT(*), MIN(time_us) FROM logs WHERE trial_id = ? AND source = 'task'", (trial["id"],)
        ).fetchone()
        ended_us = connection.execute(
            "SELECT MAX(time_us) FROM logs WHERE trial_id = ?", (trial["id"],)
        ).fetchone()[0]
    if stored[0] != num_lines:
        raise RuntimeError(f"{stored[0]} of {num_lines} lines were stored")
    return [
        (
            "log lines per second, printed, taken in and stored",
            f"{num_lines / (ended_us - stored[1]) * 1e6:,.0f}",
            "50,000",
        )
    ]


def percentiles(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the median and the 99th percentile of a call's duration, milliseconds."""
    times = []
    for _ in range(count):
        started_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - started_s) * 1e3)
    times.sort()
    return statistics.median(times), times[min(int(len(times) * 0.99), len(times) - 1)]


def measure_lists(master: MasterForTest, options: argparse.Namespace, progress: Progress) -> list[Row]:
    """Measure lists and memory with a database as large as a year of use makes it."""
    master.kill()
    task = progress.add_task("filling the database", total=options.metrics)
    fill(
        master.state.database_path,
        num_experiments=options.experiments,
        num_trials=options.trials,
        num_metrics=options.metrics,
        on_rows=lambda count: progress.advance(task, count),
    )
    master.up()
    client = master.client()
    rows = []
    last = client.get("/api/v1/experiments?limit=1&orderBy=ORDER_BY_DESC")["experiments"][0]["id"]
    for name, path in (
        ("`GET experiments`, page of 200", "/api/v1/experiments?limit=200&offset=0"),
        ("trial list, page of 200", f"/api/v1/experiments/{last}/trials?limit=200&offset=0"),
    ):
        client.get(path)
        median, high = percentiles(lambda path=path: client.get(path), options.requests)  # type: ignore[misc]
        rows.append((f"{name}: p50 / p99", f"{median:.1f} / {high:.1f} ms", "p99 under 50 ms"))
    memory = psutil.Process(master.record.pid).memory_info().rss / 2**20
    rows.append(("resident memory then", f"{memory:.0f} MiB", "under 300 MiB"))
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        if options.repeats:
            (directory / "start").mkdir()
            task = progress.add_task("starts of a trial", total=2 * (options.repeats + 1))
            rows += measure_start(directory / "start", options.repeats, lambda: progress.advance(task))
        (directory / "rest").mkdir()
        with master_for_test(directory / "rest", num_slots=1) as master:
            rows += measure_reports(master, directory / "rest", options.reports, options.clients)
            rows += measure_lines(master, directory / "rest", options.lines)
            rows += measure_lists(master, options, progress)
    stored = (
        f"{options.experiments:,} experiments, {options.trials:,} trials, {options.metrics:,} metric rows"
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; lists and memory with {stored}\n")
    print("| measured | result | aim |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if options.json:
        options.json.write_text(json.dumps([list(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
