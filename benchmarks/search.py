"""Measure a search of many short trials on a master, with new processes and with forks.

Usage: ``python benchmarks/search.py [--trials N] [--slots S] [--ways new forks] [--json FILE]``

The trials are those of ``start.py``: 20 batches on scikit-learn's digits, with a report, a validation and a checkpoint each.
Prints one Markdown table, and whether all trials have trained the same, bit for bit. See the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time

import start_marks
import start_model

from dstrial.testing.master import MasterForTest, master_for_test

HERE = pathlib.Path(__file__).resolve().parent
WAYS = {"new": "warm: false", "forks": "warm: true"}
_DEADLINE_S = 3000.0


def main(words: list[str] | None = None) -> int:
    """Measure and print; returns the exit status: 1 if trials differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=64, help="trials of the search (default: 64)")
    parser.add_argument("--slots", type=int, default=2, help="slots of the master (default: 2)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: both")
    parser.add_argument("--json", type=pathlib.Path, help="also write everything to this file")
    options = parser.parse_args(words)
    found = {}
    for way in options.ways:
        with tempfile.TemporaryDirectory(prefix="dstrial-search-") as scratch:
            found[way] = measure(WAYS[way], options.trials, options.slots, pathlib.Path(scratch))
    first = found[options.ways[0]]
    print("| trials start as | whole search, s | a trial, median s from request to end | metrics |")
    print("|---|---|---|---|")
    for way, one in found.items():
        ratio = f" ({one['wall_s'] / first['wall_s']:.2f})"
        is_same = "as above" if one["metrics"] == first["metrics"] else "OTHERS"
        print(f"| {way} | {one['wall_s']:.1f}{ratio} | {one['trial_s']:.2f} | {is_same} |")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any(one["metrics"] != first["metrics"] for one in found.values()))


def measure(setting: str, num_trials: int, num_slots: int, scratch: pathlib.Path) -> dict[str, object]:
    """Run one search on a master of its own."""
    settings = scratch / "master.yaml"
    settings.write_text(setting + "\n", encoding="utf-8")
    marks = scratch / "marks"
    marks.mkdir()
    env = {"PYTHONPATH": str(HERE), "DSTRIAL_FORK_SERVER": ""}
    with master_for_test(
        scratch, num_slots=num_slots, options=["--config", str(settings)], env=env
    ) as master:
        config = {
            "name": "search",
            "entrypoint": "python3 -m dstrial.launch --trial start_trial:StartTrial",
            "environment": {"environment_variables": [f"DSTRIAL_START_MARKS={marks}"]},
            "hyperparameters": {
                "deepspeed_config": start_model.DS_CONFIG,
                "lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2},
            },
            "searcher": {
                "name": "random",
                "metric": "validation_loss",
                "max_trials": num_trials,
                "max_concurrent_trials": num_slots,
                "max_length": {"batches": start_marks.NUM_BATCHES},
            },
            "resources": {"slots_per_trial": 1},
            "reproducibility": {"experiment_seed": 7},
            "max_restarts": 0,
        }
        path = scratch / "exp.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        context = scratch / "context"
        context.mkdir()
        began_s = time.monotonic()
        created = master.det("experiment", "create", str(path), str(context))
        if created.returncode:
            raise RuntimeError(created.stdout + created.stderr)
        wait(master)
        wall_s = time.monotonic() - began_s
        return {"wall_s": wall_s, **trials(master)}


def wait(master: MasterForTest) -> None:
    """Wait for the end of the search.

    Raises:
        RuntimeError: it failed, or takes too long.
    """
    client, give_up_at_s = master.client(), time.monotonic() + _DEADLINE_S
    while time.monotonic() < give_up_at_s:
        state = client.get("/api/v1/experiments/1")["experiment"]["state"].removeprefix("STATE_")
        if state == "COMPLETED":
            return
        if state in ("ERROR", "CANCELED"):
            break
        time.sleep(0.05)
    raise RuntimeError(f"the search is {state}")


def trials(master: MasterForTest) -> dict[str, object]:
    """Return how long trials took, and what they reported, by hyperparameters."""
    found = master.client().get("/api/v1/experiments/1/trials?limit=1000")["trials"]
    metrics, seconds = {}, []
    for trial in found:
        metrics[json.dumps(trial["hparams"]["lr"])] = trial["latestValidation"]["metrics"]["avgMetrics"]
        seconds.append(float(trial["wallClockTime"]))
    return {"metrics": metrics, "trial_s": sorted(seconds)[len(seconds) // 2]}


if __name__ == "__main__":
    sys.exit(main())
