"""Measure how one trial weighs on the others: reports among many metric names, and a long queue.

Usage: ``python benchmarks/busy_master.py [--against COMMIT] [--names N] [--stored N] [--queued N] [--seconds S] [--json FILE]``

Prints one Markdown table; see the README beside this file for how to read it. ``--against`` measures another commit in the
same run, each in turn, and adds the ratios. Starts masters of its own in temporary directories and on free ports.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
FEW_NAMES = 10
DEADLINE_S = 300.0
CONFIG = """
name: busy
entrypoint: sleep 100000
searcher:
  name: random
  metric: loss
  max_trials: {num_trials}
  max_concurrent_trials: {num_trials}
hyperparameters:
  lr: {{type: double, minval: 0.0, maxval: 1.0}}
resources: {{slots_per_trial: 1}}
max_restarts: 0
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", help="a commit to measure, too, in the same run")
    parser.add_argument("--names", type=int, default=10_000, help="metric names before (default: 10000)")
    parser.add_argument("--reports", type=int, default=300, help="reports of ten names, timed (default: 300)")
    parser.add_argument(
        "--stored", type=int, default=200_000, help="reports of another trial, stored (default: 200000)"
    )
    parser.add_argument("--queued", type=int, default=2000, help="trials that wait (default: 2000)")
    parser.add_argument("--seconds", type=float, default=10.0, help="to count processor time (default: 10)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    parser.add_argument("--measure", choices=("reports", "queue"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def report_us(num_names: int, num_reports: int, num_stored: int = 0) -> float:
    """Return the median cost of a report of ten names, microseconds.

    Args:
        num_names: that the trial has reported before.
        num_reports: over which the median is taken.
        num_stored: reports of another trial that are stored.
    """
    from dstrial.config.experiment_config.submission import MasterDefaults, check_submission
    from dstrial.master.lifecycle import allocations, experiments, trials
    from dstrial.master.store.database import Database, Transaction

    names = [f"name{number:06}" for number in range(num_names)]
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        submission = check_submission(
            CONFIG.format(num_trials=1),
            context_dir=directory,
            defaults=MasterDefaults({"type": "shared_fs", "host_path": "/checkpoints"}),
        )
        database = Database(directory / "master.db")

        def begin(tx: Transaction) -> None:
            tx.execute("INSERT INTO users (id, username, modified_us) VALUES (1, 'determined', 0)")
            experiments.create(tx, submission=submission, tgz=b"", owner_id=1, activate=True)
            allocations.assign(tx, 1, slots=[0], ports={}, resources_id="r", directory="/d", token_hashes={})

        def report(steps: int, given: list[str]) -> float:
            values: dict[str, Any] = dict.fromkeys(given, 1.0 / (steps + 1))
            started_s = time.perf_counter()
            database.write(lambda tx: trials.report_metrics(tx, 1, 1, "training", steps, 0, values))
            return (time.perf_counter() - started_s) * 1e6

        database.write(begin)
        database.write(
            lambda tx: tx.executemany(
                "INSERT INTO metrics (trial_id, run_id, group_name, steps, end_us, metrics) VALUES (2, 1, 'training', ?, 1, ?)",
                ((steps, '{"loss": 0.5}') for steps in range(num_stored)),
            )
        )
        for steps, start in enumerate(range(0, num_names, 1000)):
            report(steps, names[start : start + 1000])
        costs = [
            report(num_names + index, [names[(index * 997 + i * 101) % num_names] for i in range(FEW_NAMES)])
            for index in range(num_reports)
        ]
        database.close()
    return statistics.median(costs)


def queue_percent(num_queued: int, seconds: float) -> float:
    """Return how much of a core a master uses with one trial that runs and others that wait, percent."""
    import psutil

    from dstrial.testing.master import master_for_test

    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        (directory / "context").mkdir()
        config = directory / "busy.yaml"
        config.write_text(CONFIG.format(num_trials=num_queued + 1))
        (directory / "master").mkdir()
        with master_for_test(directory / "master", num_slots=1) as master:
            created = master.det("experiment", "create", str(config), str(directory / "context"))
            if created.returncode != 0:
                raise RuntimeError(created.stdout + created.stderr)
            process = psutil.Process(master.record.pid)
            give_up_at_s = time.monotonic() + DEADLINE_S
            # What is done once for each trial that waits is over when a second costs as much as the one before.
            last, now = float("inf"), _cpu_s(process, 1.0)
            while now < 0.9 * last or not process.children():
                if time.monotonic() > give_up_at_s:
                    raise TimeoutError(f"no trial runs after {DEADLINE_S} s")
                last, now = now, _cpu_s(process, 1.0)
            return 100.0 * _cpu_s(process, seconds) / seconds


def _cpu_s(process: Any, seconds: float) -> float:
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)


def measure(what: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure the package that this process imports."""
    if what == "reports":
        return {
            "few_us": report_us(FEW_NAMES, options.reports),
            "many_us": report_us(options.names, options.reports),
            "stored_us": report_us(FEW_NAMES, options.reports, options.stored),
        }
    return {
        "none_percent": queue_percent(0, options.seconds),
        "queued_percent": queue_percent(options.queued, options.seconds),
    }


def measure_tree(tree: pathlib.Path, what: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure the package in ``tree``, in a process of its own."""
    words = [
        f"--{name}={getattr(options, name)}" for name in ("names", "reports", "stored", "queued", "seconds")
    ]
    done = subprocess.run(
        [sys.executable, __file__, f"--measure={what}", *words],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if pathlib.Path(found.pop("package")).parent.parent != tree:
        raise RuntimeError(f"another package than that of {tree} was measured")
    return found


def rows_of(
    options: argparse.Namespace, here: dict[str, float], there: dict[str, float] | None
) -> list[tuple[str, ...]]:
    """Return the table's rows: what, now, and with another commit before and the ratio."""

    def row(text: str, key: str, unit: str) -> tuple[str, ...]:
        cells = [text, f"{here[key]:,.1f} {unit}"]
        if there is not None:
            cells += [f"{there[key]:,.1f} {unit}", f"{here[key] / max(there[key], 1e-9):.3f}"]
        return tuple(cells)

    def ratio(found: dict[str, float] | None) -> list[str]:
        return [] if found is None else [f"{found['many_us'] / found['few_us']:.2f}"]

    more = [] if there is None else [*ratio(there), ""]
    return [
        row(f"report of ten names, {FEW_NAMES} before", "few_us", "µs"),
        row(f"report of ten names, {options.names:,} before", "many_us", "µs"),
        ("the second / the first", *ratio(here), *more),
        row(f"report of ten names, {options.stored:,} reports of others", "stored_us", "µs"),
        row("a master's core, one trial runs", "none_percent", "%"),
        row(f"a master's core, {options.queued:,} wait besides", "queued_percent", "%"),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parse_arguments(arguments)
    if options.measure:
        import dstrial

        print(json.dumps({**measure(options.measure, options), "package": str(dstrial.__file__)}))
        return
    with tempfile.TemporaryDirectory() as name:
        trees = [ROOT]
        if options.against:
            trees.append(pathlib.Path(name).resolve())
            archive = subprocess.run(
                ["git", "archive", options.against, "dstrial"], cwd=ROOT, capture_output=True, check=True
            )
            subprocess.run(["tar", "-x"], cwd=trees[1], input=archive.stdout, check=True)
        found: list[dict[str, float]] = [{} for _ in trees]
        for what in ("reports", "queue"):
            for tree, figures in zip(trees, found, strict=True):
                figures.update(measure_tree(tree, what, options))
    rows = rows_of(options, found[0], found[1] if options.against else None)
    heads = ("measured", "here", *((f"at {options.against}", "here / there") if options.against else ()))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
