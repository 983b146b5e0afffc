"""Whether what dsat reports is what training then does: emitted configs, trained, against the figures of their searches.

Usage::

    python benchmarks/dsat_truth.py [--keep FILE] [--configs 10] [--measure-seconds 3]

Each case is a search of its own (``dstrial dsat ... --local``, two CPU ranks) over ``model_defs/dsat_trial`` in another
size, with another method, stage or global batch. The ``best_ds_config.json`` that it writes then takes the place of the
model definition's ``ds_config.json``, and an ordinary ``dstrial run`` trains 80 steps on a master of its own.

Trained is the end-to-end throughput of 20 steps, 41 to 60: their records by the time between the run's reports after step
40 and after step 60, with the data loader, beginnings of epochs, the loop and its reporting; validation and checkpoint
come at the end. The steps before are warm-up, with the first report, which opens TensorBoard's file. Steps 61 to 80 are
trained for comparison: what two equal windows of one run differ
by is the machine's own noise. Reported is ``end_to_end_throughput`` of the emitted configuration, and beside it
``throughput``, by the median step, and ``bare_throughput``, without reading data. ``--keep FILE`` holds one line per case;
the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dstrial.testing.master import MasterForTest, master_for_test

ROOT = Path(__file__).resolve().parents[1]
MODEL_DIR = ROOT / "model_defs" / "dsat_trial"
CONFIG = ROOT / "experiment_configs" / "dsat_trial.yaml"
WINDOW = 20
NUM_WINDOWS = 4
DEADLINE_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A search, and the model that is searched for.

    Attributes:
        name: for a person.
        width: of the net's layers.
        depth: number of them.
        words: method and flags of ``dstrial dsat``.
    """

    name: str
    width: int
    depth: int
    words: tuple[str, ...]


CASES = (
    Case("predict, batch 64", 768, 4, ("predict", "--max-trials", "5")),
    Case(
        "asha, stage 2, batch 128",
        1024,
        3,
        ("asha", "--max-trials", "4", "-z", "2", "--train-batch-size", "128"),
    ),
    Case(
        "random, stage 3, batch 256",
        768,
        4,
        ("random", "--max-trials", "4", "-z", "3", "--train-batch-size", "256"),
    ),
    Case(
        "random, free batch, stage 1",
        768,
        3,
        ("random", "--max-trials", "4", "-z", "1", "--free-batch"),
    ),
    Case(
        "binary, stage 1, batch 256",
        512,
        6,
        ("binary", "--max-trials", "4", "-z", "1", "--train-batch-size", "256"),
    ),
    Case("predict, batch 32", 1024, 4, ("predict", "--max-trials", "5", "--train-batch-size", "32")),
    Case("random, stage 0", 1024, 4, ("random", "--max-trials", "4", "-z", "0")),
    Case("asha, stages 1 and 3", 512, 8, ("asha", "--max-trials", "5", "-z", "1", "3")),
    Case(
        "predict, latency, batch 128",
        768,
        6,
        ("predict", "--max-trials", "5", "--metric", "latency", "--train-batch-size", "128"),
    ),
    Case(
        "random, the shortest backward, batch 64",
        1024,
        4,
        ("random", "--max-trials", "4", "--metric", "backward"),
    ),
)


def search(case: Case, directory: Path, model_dir: Path, measure_s: float) -> Path:
    """Search, and return the directory with what was found.

    Raises:
        SystemExit: the search failed.
    """
    output = directory / "search"
    method, *flags = case.words
    metric = [] if "--metric" in flags else ["--metric", "throughput"]
    command = [
        *(sys.executable, "-m", "dstrial.dsat", method, str(_config(case, directory)), str(model_dir)),
        *("--local", "--output", str(output), "--measure-seconds", str(measure_s), *metric, *flags),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    if ended.returncode != 0:
        raise SystemExit(f"{case.name}: the search failed\n{ended.stdout}\n{ended.stderr}")
    return output


def _config(case: Case, directory: Path) -> Path:
    import yaml

    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["name"] = "dsat truth"
    config["hyperparameters"] |= {"width": case.width, "depth": case.depth}
    length = {"batches": WINDOW * NUM_WINDOWS}
    config["searcher"]["max_length"] = config["min_validation_period"] = config["min_checkpoint_period"] = (
        length
    )
    config["scheduling_unit"] = WINDOW
    path = directory / "experiment.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def train(case: Case, directory: Path, emitted: Path, master: MasterForTest) -> list[float]:
    """Train with an emitted config; returns samples/s of the third and the fourth window.

    Raises:
        SystemExit: the run failed.
    """
    model_dir, runs = directory / "model", directory / "runs"
    shutil.copytree(MODEL_DIR, model_dir, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(emitted, model_dir / "ds_config.json")
    ended = master.dstrial(
        *("run", str(_config(case, directory)), str(model_dir)),
        *("--no-progress", "--runs-dir", str(runs)),
        deadline_s=DEADLINE_S,
    )
    if ended.returncode != 0:
        raise SystemExit(f"{case.name}: the training failed\n{ended.stdout}\n{ended.stderr}")
    (path,) = runs.glob("*/*/metrics.jsonl")
    rows = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    times = [datetime.datetime.fromisoformat(row["time"]) for row in rows if row["group"] == "training"]
    assert len(times) == NUM_WINDOWS, rows
    num_records = WINDOW * json.loads(emitted.read_text(encoding="utf-8"))["train_batch_size"]
    return [num_records / (after - before).total_seconds() for before, after in itertools.pairwise(times[1:])]


def play(case: Case, measure_s: float, master: MasterForTest) -> dict[str, Any]:
    """Search and train; returns the line that is kept."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dsat-truth-") as name:
        directory = Path(name)
        found = search(case, directory, MODEL_DIR, measure_s)
        searched_s = time.monotonic() - began_s
        metrics = json.loads((found / "best_ds_metrics.json").read_text(encoding="utf-8"))
        report = json.loads((found / "report.json").read_text(encoding="utf-8"))
        best = next(row for row in report["trials"] if row["trial_id"] == report["best"])
        trained = train(case, directory, found / "best_ds_config.json", master)
    return {
        "case": case.name,
        "words": [*case.words, case.width, case.depth, measure_s],
        "configuration": best["description"],
        "num_trials": len(report["trials"]),
        "reported": metrics["end_to_end_throughput"],
        "by_median": metrics["throughput"],
        "half_width": metrics["half_width"],
        "drift": metrics.get("drift", 1.0),
        "bare": metrics["bare_throughput"],
        "trained": trained,
        "search_s": round(searched_s, 1),
        "seconds": round(time.monotonic() - began_s, 1),
        "load": os.getloadavg()[0],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with their means."""
    lines = [
        "| search | emitted | reported, end to end | trained, steps 41-60 | difference | reported, by the median step | "
        "reported, bare | trained, steps 61-80 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        trained, again = row["trained"]

        def beside(value: float, trained: float = trained) -> str:
            return f"{value:.1f} ({value / trained - 1:+.1%})"

        # What was corrected for the machine's drift is compared with earlier trials, not with a training now.
        drift = "" if row["drift"] == 1 else f", corrected for a drift of {row['drift']:.2f}"
        lines.append(
            f"| {row['case']} | {row['configuration']} | {row['reported']:.1f} | {trained:.1f} | "
            f"{row['reported'] / trained - 1:+.1%} | {beside(row['by_median'])} ± {row['half_width']:.1%}{drift} | "
            f"{beside(row['bare'])} | {beside(again)} |"
        )
    lines.append("")
    for name, key in (
        ("reported, end to end", "reported"),
        ("reported, by the median step", "by_median"),
        ("reported, bare", "bare"),
    ):
        off = [row[key] / row["trained"][0] - 1 for row in rows]
        whole = [row[key] / statistics.harmonic_mean(row["trained"]) - 1 for row in rows]
        lines.append(f"{name}: against steps 41-60 {_off(off)}; against steps 41-80 {_off(whole)}  ")
    noise = [row["trained"][1] / row["trained"][0] - 1 for row in rows]
    lines.append(f"noise, steps 61-80 against steps 41-60 of the same run: {_off(noise)}  ")
    loads = [row["load"] for row in rows]
    lines.append(
        f"{len(rows)} configs, {sum(row['seconds'] for row in rows):.0f} s in all; load average {min(loads):.1f} to "
        f"{max(loads):.1f} on {os.cpu_count()} cores"
    )
    return "\n".join(lines)


def _off(differences: Sequence[float]) -> str:
    return (
        f"mean absolute difference {statistics.fmean(map(abs, differences)):.1%}, mean "
        f"{statistics.fmean(differences):+.1%}, worst {max(differences, key=abs):+.1%}"
    )


def read(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines that are kept; the end of one that was being written is left out."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="file with what is done, to go on with")
    parser.add_argument("--configs", type=int, default=len(CASES), help=f"so many of the {len(CASES)} cases")
    parser.add_argument(
        "--measure-seconds", type=float, default=3.0, help="of timed steps, for each trial of a search"
    )
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    cases = CASES[: options.configs]
    known = {json.dumps(row["words"]): row for row in read(options.keep)}
    keys = {
        case: json.dumps([*case.words, case.width, case.depth, options.measure_seconds]) for case in cases
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with (
        tempfile.TemporaryDirectory(prefix="dsat-truth-") as name,
        Progress(*columns, console=Console(stderr=True)) as progress,
        master_for_test(Path(name)) as master,
    ):
        bar = progress.add_task("", total=len(cases), completed=sum(keys[case] in known for case in cases))
        for case in cases:
            if keys[case] in known:
                continue
            progress.update(bar, description=case.name)
            row = known[keys[case]] = play(case, options.measure_seconds, master)
            if options.keep is not None:
                with options.keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            progress.advance(bar)
    print(table([known[keys[case]] for case in cases if keys[case] in known]))


if __name__ == "__main__":
    main()
