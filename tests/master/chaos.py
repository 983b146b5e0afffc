"""Kill the master, a trial's supervisor, its entrypoint or one of its ranks at random moments of small searches.

Usage: ``python tests/master/chaos.py [--runs N] [--seed S | --seeds S,S,...] [--workers W] [--real] [--out FILE]``

Every run is a search of its own under a master of its own; its seed says which searcher, what is killed and when. Its
trials have two ranks that exchange something at every batch. Afterwards the experiment must be COMPLETED with the trials
of the undisturbed search, each trial's batches reported once and without a gap up to where the searcher may end it, its
losses those of undisturbed training, every line that a rank has printed stored once, no process left, and the database
sound. With ``--real`` the trials are those of ``model_defs/digits`` on two DeepSpeed ranks (ZeRO 1), and every validation
must be bit for bit that of a search that was left alone.
"""

from __future__ import annotations

import argparse
import base64
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import yaml

from dstrial.master.launcher import SupervisorHandle, is_alive
from dstrial.search.simulation import simulate
from dstrial.testing.master import MasterForTest, master_for_test

NUM_STEPS = 24
FIRST_RUNG = 12
NUM_RANKS = 2
DEADLINE_S = 240.0
TARGETS = ("master", "supervisor", "entrypoint", "rank")
ROOT = pathlib.Path(__file__).parents[2]
_HALVING = {
    "max_trials": 4,
    "max_concurrent_trials": 2,
    "divisor": 2,
    "max_time": NUM_STEPS,
    "time_metric": "batches",
}
SEARCHERS: dict[str, dict[str, Any]] = {
    "random": {"max_trials": 3, "max_concurrent_trials": 2},
    "async_halving": {**_HALVING, "num_rungs": 2},
    "adaptive_asha": {**_HALVING, "max_rungs": 2, "mode": "standard", "bracket_rungs": []},
}
HPARAMS = {"lr": {"type": "double", "minval": 0.01, "maxval": 0.2}}

SCRIPT = """
import json, os, pathlib, subprocess, sys, time
import determined as det

STEPS, RANKS = @STEPS, @RANKS

def main():
    ranks = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, "RANK": str(rank)}) for rank in range(RANKS)
    ]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() not in (None, 0) for rank in ranks):
            # Without a traceback, two of which before the first batch would end the trial for good.
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)
    sys.exit(3 if any(rank.wait() for rank in ranks) else 0)

def step(state, lr):
    return state - lr * (2.0 * state - 0.1 * state * state)

def train(rank):
    info = det.get_cluster_info()
    lr, ledger = info.trial.hparams["lr"], info.trial.hparams["ledger"]
    name = f"run {info.trial._trial_run_id} rank {rank}"
    told = open(pathlib.Path(ledger, f"{info.trial.trial_id} {name}"), "w")
    distributed = det.core.DistributedContext(
        rank=rank, size=RANKS, local_rank=rank, local_size=RANKS, cross_rank=0, cross_size=1,
        chief_ip="127.0.0.1",
    )
    with det.core.init(distributed=distributed) as core:
        done, state = 0, 1.0
        if info.latest_checkpoint is not None:
            with core.checkpoint.restore_path(info.latest_checkpoint) as path:
                done, state = json.loads((path / "state.json").read_text())
        while done < STEPS:
            time.sleep(0.05)
            state, done = step(state, lr), done + 1
            assert set(distributed.allgather(state)) == {state}
            # One write, so that the lines of two ranks do not mix.
            sys.stdout.write(f"{name} batch {done}\\n")
            sys.stdout.flush()
            told.write(f"{name} batch {done}\\n")
            told.flush()
            if rank == 0:
                core.train.report_training_metrics(done, {"loss": state})
            if done % 4 == 0:
                if rank == 0:
                    core.train.report_validation_metrics(done, {"validation_loss": state, "batches": done})
                    with core.checkpoint.store_path({"steps_completed": done}) as (path, _):
                        (path / "state.json").write_text(json.dumps([done, state]))
            if core.preempt.should_preempt():
                break

if __name__ == "__main__":
    train(int(os.environ["RANK"])) if "RANK" in os.environ else main()
""".replace("@STEPS", str(NUM_STEPS)).replace("@RANKS", str(NUM_RANKS))


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        seed: of the run.
        searcher: its name.
        killed: what was killed, in order.
        problems: what was wrong afterwards; none if all was right.
        seconds: how long it took.
    """

    seed: int
    searcher: str
    killed: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float


def losses(lr: float) -> list[float]:
    """Return the loss after every step of undisturbed training."""
    found, state = [], 1.0
    for _ in range(NUM_STEPS):
        state -= lr * (2.0 * state - 0.1 * state * state)
        found.append(state)
    return found


def searcher_of(seed: int) -> dict[str, Any]:
    """Return the searcher of a run: every kind in turn."""
    # Not in step with what is killed first, which goes by the seed too.
    name = list(SEARCHERS)[seed // len(TARGETS) % len(SEARCHERS)]
    metric = {"metric": "validation_loss", "smaller_is_better": True}
    return {"name": name, **metric, **SEARCHERS[name]}


def submit(master: MasterForTest, seed: int, ledger: pathlib.Path) -> int:
    """Submit a small search and return its id."""
    config = {
        "name": f"chaos-{seed}",
        "entrypoint": "python3 train.py",
        "hyperparameters": {**HPARAMS, "ledger": str(ledger)},
        "searcher": searcher_of(seed),
        "resources": {"slots_per_trial": NUM_RANKS},
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": seed},
    }
    content = base64.b64encode(SCRIPT.encode()).decode()
    file = {"path": "train.py", "type": 48, "content": content, "mtime": "0", "mode": 420}
    message = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": [file]}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


def submit_digits(master: MasterForTest, seed: int) -> int:
    """Submit a search of real DeepSpeed trials and return its id."""
    context = ROOT / "model_defs" / "digits"
    config = yaml.safe_load((ROOT / "experiment_configs" / "digits.yaml").read_text())
    config["hyperparameters"]["dropout"] = {"type": "double", "minval": 0.1, "maxval": 0.5}
    config["hyperparameters"]["overwrite_deepspeed_args"] = {"zero_optimization": {"stage": 1}}
    config["searcher"] |= {"name": "random", "max_trials": 2, "max_concurrent_trials": 2}
    config["searcher"]["max_length"] = {"epochs": 4}
    config |= {
        "min_checkpoint_period": {"batches": 10},
        "resources": {"slots_per_trial": NUM_RANKS},
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": seed},
    }
    files = [
        {
            "path": path.name,
            "type": 48,
            "content": base64.b64encode(path.read_bytes()).decode(),
            "mtime": "0",
            "mode": 420,
        }
        for path in (context / "model_def.py", context / "ds_config.json")
    ]
    message = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": files}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


@contextlib.contextmanager
def opened(master: MasterForTest) -> Iterator[sqlite3.Connection]:
    """Open the master's database to look."""
    connection = sqlite3.connect(master.state.database_path, timeout=30)
    connection.row_factory = sqlite3.Row
    try:
        yield connection
    finally:
        connection.close()


def state_of(master: MasterForTest, experiment_id: int) -> str:
    """Return the experiment's stored state."""
    with opened(master) as connection:
        row = connection.execute("SELECT state FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
    return str(row["state"])


def children_of(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid and fields[0] != b"Z":
                    found.append(int(entry.name))
    return found


def strike(master: MasterForTest, target: str, chance: random.Random) -> str | None:
    """Kill one target; return what was killed, None if there was nothing to kill."""
    if target == "master":
        master.kill()
        time.sleep(chance.uniform(0.0, 1.5))
        master.up()
        return target
    with opened(master) as connection:
        rows = connection.execute(
            "SELECT supervisor_pid, supervisor_start FROM allocations "
            "WHERE state = 'RUNNING' AND supervisor_pid IS NOT NULL"
        ).fetchall()
    handles = [SupervisorHandle(row["supervisor_pid"], row["supervisor_start"]) for row in rows]
    handles = [handle for handle in handles if is_alive(handle)]
    if not handles:
        return None
    pid = chance.choice(handles).pid
    if target != "supervisor":
        entrypoints = children_of(pid)
        if not entrypoints:
            return None
        pid = entrypoints[0]
    if target == "rank":
        below = children_of(pid)
        # Behind a shell, the script is one further down.
        below = [grandchild for child in below for grandchild in children_of(child)] or below
        if not below:
            return None
        pid = below[0]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return target


def look(
    master: MasterForTest, experiment_id: int, seed: int, ledger: pathlib.Path, lossy: bool
) -> list[str]:
    """Return what is wrong with an experiment that has ended; ``lossy`` if a supervisor was killed."""
    problems = []
    searcher = searcher_of(seed)
    with opened(master) as connection:
        trials = connection.execute(
            "SELECT * FROM trials WHERE experiment_id = ?", (experiment_id,)
        ).fetchall()
        planned = simulate(
            {"searcher": searcher, "hyperparameters": HPARAMS}, seed, lambda hparams, _time: hparams["lr"]
        )
        wanted = sorted(trial.hparams["lr"] for trial in planned.trials)
        if sorted(json.loads(trial["hparams"])["lr"] for trial in trials) != wanted:
            problems.append(f"{len(trials)} trials that are not the {len(wanted)} of the undisturbed search")
        lengths = [_length(connection, trial["id"]) for trial in trials]
        if searcher["name"] == "random" and set(lengths) != {NUM_STEPS}:
            problems.append(f"trials end at {lengths}")
        elif NUM_STEPS not in lengths or min(lengths) < FIRST_RUNG:
            problems.append(
                f"trials end at {lengths}, with a rung at {FIRST_RUNG} and the end at {NUM_STEPS}"
            )
        for trial in trials:
            problems += look_at_trial(connection, trial, ledger, lossy)
    return problems


def look_around(master: MasterForTest) -> list[str]:
    """Return what is wrong with the database and with the machine after every trial has ended."""
    problems = []
    with opened(master) as connection:
        if connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
            problems.append("the database is damaged")
    marked = [
        entry.name
        for entry in pathlib.Path("/proc").iterdir()
        if entry.name.isdigit() and _belongs_to(entry, master)
    ]
    if marked:
        problems.append(f"processes {marked} are left")
    return problems


def _series(connection: sqlite3.Connection, trial_id: int, group: str) -> list[tuple[int, dict[str, Any]]]:
    rows = connection.execute(
        "SELECT steps, metrics FROM metrics WHERE trial_id = ? AND group_name = ? AND archived = 0 ORDER BY steps",
        (trial_id, group),
    )
    return [(row["steps"], json.loads(row["metrics"])) for row in rows]


def _length(connection: sqlite3.Connection, trial_id: int) -> int:
    return max((steps for steps, _ in _series(connection, trial_id, "training")), default=0)


def look_at_trial(
    connection: sqlite3.Connection, trial: sqlite3.Row, ledger: pathlib.Path, lossy: bool
) -> list[str]:
    """Return what is wrong with a trial."""
    problems = []
    name = f"trial {trial['id']}"
    if trial["state"] != "COMPLETED":
        problems.append(f"{name} is {trial['state']}")
    series = _series(connection, trial["id"], "training")
    steps = [step for step, _ in series]
    if steps != list(range(1, len(steps) + 1)):
        problems.append(f"{name} has reported {steps}")
    elif [values["loss"] for _, values in series] != losses(json.loads(trial["hparams"])["lr"])[: len(steps)]:
        problems.append(f"{name} has other losses")
    summary = json.loads(trial["summary_metrics"]).get("avg_metrics", {}).get("loss", {})
    if summary.get("count") != len(steps):
        problems.append(f"{name} has a summary of {summary.get('count')} reports, not {len(steps)}")
    stored = collections.Counter(
        row["log"]
        for row in connection.execute(
            "SELECT log FROM logs WHERE trial_id = ? AND log LIKE 'run %'", (trial["id"],)
        )
    )
    doubled = [line for line, count in stored.items() if count > 1]
    if doubled:
        problems.append(f"{name} has lines twice: {doubled[:3]}")
    told = set()
    for path in ledger.glob(f"{trial['id']} run *"):
        # A rank that dies in the middle of a line has not told it.
        told.update(line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))
    missing = sorted(told - stored.keys())
    if missing and not lossy:
        problems.append(f"{name} lacks {len(missing)} lines that were printed: {missing[:3]}")
    if missing and lossy and len(missing) > 4 * NUM_RANKS:
        problems.append(f"{name} lacks {len(missing)} lines around a killed supervisor: {missing[:3]}")
    if not told:
        problems.append(f"{name} has told nothing")
    return problems


def look_at_digits(master: MasterForTest, undisturbed_id: int, experiment_id: int) -> list[str]:
    """Return where a search of real trials differs from the one that was left alone."""
    found: list[dict[str, Any]] = []
    with opened(master) as connection:
        for searched in (undisturbed_id, experiment_id):
            trials = connection.execute(
                "SELECT * FROM trials WHERE experiment_id = ?", (searched,)
            ).fetchall()
            found.append(
                {
                    trial["hparams"]: (trial["state"], _series(connection, trial["id"], "validation"))
                    for trial in trials
                }
            )
    problems = []
    if not found[0] or found[0].keys() != found[1].keys():
        problems.append(f"trials of {sorted(found[1])}; undisturbed of {sorted(found[0])}")
    for hparams in found[0].keys() & found[1].keys():
        if found[0][hparams] != found[1][hparams]:
            problems.append(f"{found[1][hparams]}; undisturbed {found[0][hparams]}")
    return problems


def _belongs_to(entry: pathlib.Path, master: MasterForTest) -> bool:
    try:
        return f"DSTRIAL_ALLOCATION_DIR={master.state.path}".encode() in (entry / "environ").read_bytes()
    except OSError:
        return False


def run(seed: int, is_real: bool = False) -> Outcome:
    """Run one search and disturb it once to three times."""
    chance = random.Random(seed)
    started_s = time.monotonic()
    killed: list[str] = []
    pace = 4.0 if is_real else 1.0
    with (
        tempfile.TemporaryDirectory(prefix="dstrial-chaos-") as name,
        master_for_test(pathlib.Path(name), num_slots=2 * NUM_RANKS) as master,
    ):
        ledger = pathlib.Path(name, "ledger")
        ledger.mkdir()
        undisturbed_id = None
        if is_real:
            undisturbed_id = submit_digits(master, seed)
            wait(master, undisturbed_id)
            experiment_id = submit_digits(master, seed)
        else:
            experiment_id = submit(master, seed, ledger)
        for index in range(chance.randint(1, 3)):
            time.sleep(pace * chance.uniform(0.2, 3.0))
            if state_of(master, experiment_id) == "COMPLETED":
                break
            # Every kind comes first equally often.
            target = TARGETS[seed % len(TARGETS)] if index == 0 else chance.choice(TARGETS)
            hit = strike(master, target, chance)
            if hit is not None:
                killed.append(hit)
        state = wait(master, experiment_id)
        if undisturbed_id is None:
            problems = look(master, experiment_id, seed, ledger, "supervisor" in killed)
        else:
            problems = look_at_digits(master, undisturbed_id, experiment_id)
        problems += look_around(master)
        if state != "COMPLETED":
            problems.insert(0, f"the experiment is {state}")
            with opened(master) as connection:
                rows = connection.execute("SELECT log FROM logs ORDER BY id DESC LIMIT 40").fetchall()
            problems.append("".join(row["log"] for row in reversed(rows)))
    searcher = "digits" if is_real else str(searcher_of(seed)["name"])
    return Outcome(seed, searcher, tuple(killed), tuple(problems), time.monotonic() - started_s)


def wait(master: MasterForTest, experiment_id: int) -> str:
    """Wait for the end of an experiment, until the deadline; return its state."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while (state := state_of(master, experiment_id)) not in ("COMPLETED", "ERROR", "CANCELED"):
        if time.monotonic() > give_up_at_s:
            break
        time.sleep(0.1)
    return state


def _table(outcomes: list[Outcome]) -> str:
    lines = ["| killed | times | in runs | of them right |", "|---|---|---|---|"]
    for target in TARGETS:
        touched = [outcome for outcome in outcomes if target in outcome.killed]
        times = sum(outcome.killed.count(target) for outcome in outcomes)
        right = sum(not outcome.problems for outcome in touched)
        lines.append(f"| {target} | {times} | {len(touched)} | {right} |")
    lines += ["", "| search | runs | of them right | seconds a run |", "|---|---|---|---|"]
    for searcher in sorted({outcome.searcher for outcome in outcomes}):
        of = [outcome for outcome in outcomes if outcome.searcher == searcher]
        right = sum(not outcome.problems for outcome in of)
        seconds = f"{min(o.seconds for o in of):.0f} to {max(o.seconds for o in of):.0f}"
        lines.append(f"| {searcher} | {len(of)} | {right} | {seconds} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, print each run and two tables; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--seeds", help="these instead, with commas between them")
    parser.add_argument("--workers", type=int, default=2, help="runs at once (default: 2)")
    parser.add_argument("--real", action="store_true", help="train model_defs/digits with DeepSpeed")
    parser.add_argument("--out", type=pathlib.Path, help="write every outcome there, as JSON")
    options = parser.parse_args(arguments)
    seeds = list(range(options.seed, options.seed + options.runs))
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for outcome in pool.map(run, seeds, [options.real] * len(seeds)):
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "right"
            print(
                f"seed {outcome.seed} ({outcome.searcher}): {', '.join(outcome.killed)}: {verdict} "
                f"({outcome.seconds:.0f} s)",
                flush=True,
            )
    if options.out is not None:
        options.out.write_text(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    wrong = [outcome for outcome in outcomes if outcome.problems]
    print(f"\n{_table(outcomes)}\n\n{len(outcomes) - len(wrong)} of {len(outcomes)} runs ended right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
