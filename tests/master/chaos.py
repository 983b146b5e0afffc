"""Kill the master, a supervisor, an entrypoint, a rank or the fork server at random moments of small searches.

Usage: ``python tests/master/chaos.py [--runs N] [--seed S | --seeds S,S,...] [--workers W] [--real] [--out FILE]``

Every run is a search of its own under a master of its own; its seed says which searcher, what is killed and when. A trial
is a launcher and two ranks that exchange something at every batch and keep journals. Afterwards the experiment must be
COMPLETED with the trials of the undisturbed search; the searcher's state that of one that is told the stored validations
once; each trial's series without a gap from batch 1 to the batch where the searcher ended it, with the losses of
undisturbed training and a checkpoint at its end; everything that the master had confirmed and every line that a rank had
printed stored once; no process, directory or token left, and the database sound.

With ``--real`` the trials are those of ``model_defs/digits`` on two DeepSpeed ranks (ZeRO 1), forks of the fork server as
soon as that has imported everything, and every validation must be bit for bit that of a search that was left alone.
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import chaos_checks
import chaos_train
import yaml

from dstrial.fork_server.client import SHARED_VARIABLE
from dstrial.master.backends import SupervisorHandle, is_alive, shown_servers
from dstrial.testing.master import MasterForTest, master_for_test

DEADLINE_S = 240.0
MAX_MOMENTS = 3
TARGETS = ("master", "supervisor", "entrypoint", "rank")
REAL_TARGETS = (*TARGETS, "fork server")
_RANK_MODULE = b"dstrial.launch.rank_main"
RUNGS = {6, 12, 24}
REAL_SEED = 20
ROOT = pathlib.Path(__file__).parents[2]
_END = ("COMPLETED", "ERROR", "CANCELED")
_HALVING = {"max_trials": 4, "max_concurrent_trials": 2, "divisor": 2}
SEARCHERS: dict[str, dict[str, Any]] = {
    "random": {"max_trials": 3, "max_concurrent_trials": 2},
    "async_halving": {**_HALVING, "num_rungs": 3},
    "adaptive_asha": {**_HALVING, "max_rungs": 3, "mode": "standard"},
}
_real_reference_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Strike:
    """One process that was killed.

    Attributes:
        target: what it was.
        trial_id: whose, None for the master's.
        run_id: of which run of that trial.
    """

    target: str
    trial_id: int | None = None
    run_id: int | None = None


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


def searcher_of(seed: int) -> str:
    """Return the searcher of a run; every one meets every first target."""
    return list(SEARCHERS)[seed // len(TARGETS) % len(SEARCHERS)]


def submit(master: MasterForTest, seed: int, journals: pathlib.Path) -> int:
    """Submit a small search without torch and return its id."""
    name = searcher_of(seed)
    searcher = {
        "name": name, "metric": "validation_loss", "smaller_is_better": True, **SEARCHERS[name],
    }  # fmt: skip
    if name != "random":
        searcher |= {"time_metric": "batches", "max_time": chaos_train.NUM_STEPS}
    config = {
        "name": f"chaos-{seed}",
        "entrypoint": "python3 chaos_train.py",
        "hyperparameters": {
            "lr": {"type": "double", "minval": 0.01, "maxval": 0.2},
            "journals": str(journals),
        },
        "searcher": searcher,
        "resources": {"slots_per_trial": chaos_train.NUM_RANKS},
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": seed},
    }
    return _post(master, config, [pathlib.Path(chaos_train.__file__)])


def submit_digits(master: MasterForTest, name: str) -> int:
    """Submit a search of real DeepSpeed trials and return its id."""
    context = ROOT / "model_defs" / "digits"
    config = yaml.safe_load((ROOT / "experiment_configs" / "digits.yaml").read_text())
    config["hyperparameters"]["dropout"] = {"type": "double", "minval": 0.1, "maxval": 0.5}
    searcher = {"name": name, "metric": "validation_loss", "smaller_is_better": True, "max_trials": 2}
    if name == "random":
        searcher["max_length"] = {"epochs": 4}
    else:
        searcher |= {"time_metric": "epochs", "max_time": 4, "divisor": 2}
        searcher["num_rungs" if name == "async_halving" else "max_rungs"] = 2
    config |= {
        "name": f"chaos-digits-{name}",
        "searcher": {**searcher, "max_concurrent_trials": 2},
        "min_checkpoint_period": {"batches": 10},
        "resources": {"slots_per_trial": 2},
        "max_restarts": 20,
        "reproducibility": {"experiment_seed": REAL_SEED},
    }
    return _post(master, config, [context / "model_def.py", context / "ds_config.json"])


def _post(master: MasterForTest, config: dict[str, Any], paths: Sequence[pathlib.Path]) -> int:
    files = [
        {
            "path": path.name,
            "type": 48,
            "content": base64.b64encode(path.read_bytes()).decode(),
            "mtime": "0",
            "mode": 420,
        }
        for path in paths
    ]
    message = {"activate": True, "config": yaml.safe_dump(config), "modelDefinition": files}
    return int(master.client().post("/api/v1/experiments", message)["experiment"]["id"])


def state_of(master: MasterForTest, experiment_id: int) -> str:
    """Return the experiment's stored state."""
    with chaos_checks.opened(master) as connection:
        row = connection.execute("SELECT state FROM experiments WHERE id = ?", (experiment_id,)).fetchone()
    return str(row["state"])


def wait(master: MasterForTest, experiment_id: int) -> None:
    """Wait for the end of an experiment and of its processes, until the deadline."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at_s:
        if state_of(master, experiment_id) in _END:
            with chaos_checks.opened(master) as connection:
                left = connection.execute("SELECT 1 FROM allocations WHERE state != 'TERMINATED'").fetchone()
            # The directory of an allocation is removed behind its last row.
            if left is None and not any((master.state.path / "allocations").iterdir()):
                return
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[1]) == pid and fields[0] != b"Z":
                    found.append(int(entry.name))
    return sorted(found)


def ranks_below(pid: int) -> list[int]:
    """Return the ranks that a process, or what it has started, has started; not what they have started themselves."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            variables = pathlib.Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            # A fork has its variables elsewhere.
            is_rank = any(variable.startswith(b"RANK=") for variable in variables) or _RANK_MODULE in words
            found += [child] if is_rank else ranks_below(child)
    return found


def hit(master: MasterForTest, target: str, chance: random.Random, trial_id: int | None) -> Strike | None:
    """Kill a process of a trial, any if none is given; None if there was nothing to kill."""
    if target == "fork server":
        return hit_fork_server(master, chance)
    with chaos_checks.opened(master) as connection:
        rows = connection.execute(
            "SELECT * FROM allocations WHERE state = 'RUNNING' AND supervisor_pid IS NOT NULL ORDER BY id"
        ).fetchall()
    alive = [row for row in rows if is_alive(_handle(row)) and trial_id in (None, row["trial_id"])]
    if not alive:
        return None
    row = chance.choice(alive)
    if target == "supervisor":
        pids = [row["supervisor_pid"]]
    else:
        pids = (children_of if target == "entrypoint" else ranks_below)(row["supervisor_pid"])
    if not pids:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    return Strike(target, row["trial_id"], row["run_id"])


def hit_fork_server(master: MasterForTest, chance: random.Random) -> Strike | None:
    """Kill what trials are forked from; None if there is nothing."""
    pids = [one.pid for one in shown_servers(master.state.path) if one.pid is not None]
    if not pids:
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(pids), signal.SIGKILL)
    return Strike("fork server")


def strike(master: MasterForTest, target: str, chance: random.Random, trial_id: int | None) -> list[Strike]:
    """Kill one target, and sometimes another one while the master is away; return what was killed."""
    if target != "master":
        done = hit(master, target, chance, trial_id)
        return [] if done is None else [done]
    master.kill()
    strikes = [Strike(target)]
    time.sleep(chance.uniform(0.0, 0.75))
    if chance.random() < 0.3:
        done = hit(master, chance.choice(TARGETS[1:]), chance, trial_id)
        strikes += [] if done is None else [done]
    time.sleep(chance.uniform(0.0, 0.75))
    master.up()
    return strikes


def stopping_trial(master: MasterForTest, experiment_id: int, timeout_s: float) -> int | None:
    """Wait for a trial that the searcher has stopped and that has not ended; None if there is none in time."""
    give_up_at_s = time.monotonic() + timeout_s
    with chaos_checks.opened(master) as connection:
        while time.monotonic() < give_up_at_s:
            row = connection.execute(
                "SELECT id FROM trials WHERE experiment_id = ? AND state = 'STOPPING_COMPLETED'",
                (experiment_id,),
            ).fetchone()
            if row is not None:
                return int(row["id"])
            time.sleep(0.002)
    return None


def _handle(row: sqlite3.Row) -> SupervisorHandle:
    return SupervisorHandle(row["supervisor_pid"], row["supervisor_start"])


def disturb(
    master: MasterForTest, experiment_id: int, seed: int, pace: float, targets: Sequence[str] = TARGETS
) -> list[Strike]:
    """Kill targets at one to three moments while an experiment runs.

    Args:
        master: the master.
        experiment_id: the experiment.
        seed: says what and when; some moments are those at which a trial saves its last checkpoint.
        pace: 1 for up to three seconds between two.
        targets: what may be killed.
    """
    chance = random.Random(seed)
    strikes: list[Strike] = []
    for index in range(chance.randint(1, MAX_MOMENTS)):
        time.sleep(pace * chance.uniform(0.2, 3.0))
        trial_id = None
        if chance.random() < 0.4 and searcher_of(seed) != "random":
            trial_id = stopping_trial(master, experiment_id, pace * 5.0)
        if state_of(master, experiment_id) in _END:
            break
        # Every kind comes first equally often.
        target = targets[seed % len(targets)] if index == 0 else chance.choice(targets)
        strikes += strike(master, target, chance, trial_id)
    return strikes


@contextlib.contextmanager
def _scene(num_slots: int) -> Iterator[tuple[pathlib.Path, MasterForTest]]:
    with tempfile.TemporaryDirectory(prefix="dstrial-chaos-", ignore_cleanup_errors=True) as name:
        directory = pathlib.Path(name)
        for child in ("journals", "tmp"):
            (directory / child).mkdir()
        # With a fork server of its own.
        env = {"TMPDIR": str(directory / "tmp"), SHARED_VARIABLE: ""}
        with master_for_test(directory, num_slots=num_slots, env=env) as master:
            yield directory, master


def run(seed: int, *, is_disturbed: bool = True) -> Outcome:
    """Run one search, disturb it, and look."""
    started_s = time.monotonic()
    with _scene(2 * chaos_train.NUM_RANKS) as (directory, master):
        experiment_id = submit(master, seed, directory / "journals")
        strikes = disturb(master, experiment_id, seed, 1.0) if is_disturbed else []
        wait(master, experiment_id)
        cut_off = {
            (strike.trial_id, strike.run_id)
            for strike in strikes
            if strike.target == "supervisor" and strike.trial_id is not None and strike.run_id is not None
        }
        with chaos_checks.opened(master) as connection:
            search = chaos_checks.search_of(connection, experiment_id)
            problems = [
                *chaos_checks.look_at_search(search, is_exact=True),
                *chaos_checks.look_at_training(
                    search, RUNGS if search.is_halving else {chaos_train.NUM_STEPS}
                ),
                *chaos_checks.look_at_journals(search, directory / "journals", cut_off),
                *chaos_checks.look_at_allocations(search),
                *chaos_checks.look_around(master, connection),
            ]
            if problems:
                problems.append(_story(search))
    return _outcome(seed, strikes, problems, started_s)


@functools.cache
def _reference_validations() -> chaos_checks.Validations:
    """Train every real trial to its end, undisturbed, once for all runs."""
    with _scene(2) as (_, master):
        experiment_id = submit_digits(master, "random")
        wait(master, experiment_id)
        with chaos_checks.opened(master) as connection:
            return chaos_checks.validations_of(chaos_checks.search_of(connection, experiment_id))


def run_real(seed: int) -> Outcome:
    """Run one search of real trials, disturb it, and compare it with the one that was left alone."""
    with _real_reference_lock:
        reference = _reference_validations()
    started_s = time.monotonic()
    with _scene(2) as (_, master):
        experiment_id = submit_digits(master, searcher_of(seed))
        strikes = disturb(master, experiment_id, seed, 3.0, REAL_TARGETS)
        wait(master, experiment_id)
        with chaos_checks.opened(master) as connection:
            search = chaos_checks.search_of(connection, experiment_id)
            problems = [
                *chaos_checks.look_at_search(search, is_exact=False),
                *chaos_checks.look_at_validations(search, reference),
                *chaos_checks.look_at_allocations(search),
                *chaos_checks.look_around(master, connection),
            ]
            if problems:
                problems.append(_story(search))
    return _outcome(seed, strikes, problems, started_s)


def _outcome(seed: int, strikes: list[Strike], problems: list[str], started_s: float) -> Outcome:
    killed = tuple(strike.target for strike in strikes)
    return Outcome(seed, searcher_of(seed), killed, tuple(problems), time.monotonic() - started_s)


def _story(search: chaos_checks.Search) -> str:
    """Return the log's end, by which a wrong run can be understood."""
    rows = search.connection.execute("SELECT * FROM logs ORDER BY id DESC LIMIT 150").fetchall()
    return "\n" + "".join(f"{row['time_us']} trial {row['trial_id']}: {row['log']}" for row in rows[::-1])


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes by searcher and by what was killed, in Markdown."""
    lines = ["| searcher | killed | times | in runs | of them right |", "|---|---|---|---|---|"]
    for searcher in SEARCHERS:
        of_searcher = [outcome for outcome in outcomes if outcome.searcher == searcher]
        for target in REAL_TARGETS:
            touched = [outcome for outcome in of_searcher if target in outcome.killed]
            times = sum(outcome.killed.count(target) for outcome in touched)
            right = sum(not outcome.problems for outcome in touched)
            lines.append(f"| {searcher} | {target} | {times} | {len(touched)} | {right} |")
        right = sum(not outcome.problems for outcome in of_searcher)
        times = sum(len(outcome.killed) for outcome in of_searcher)
        lines.append(f"| **{searcher}** | **all** | {times} | {len(of_searcher)} | {right} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run, print each run and a table; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (default: 0)")
    parser.add_argument("--seeds", help="these instead, with commas between them")
    parser.add_argument("--workers", type=int, default=2, help="runs at once (default: 2)")
    parser.add_argument("--real", action="store_true", help="train model_defs/digits with DeepSpeed")
    parser.add_argument("--undisturbed", action="store_true", help="kill nothing, to check the checks")
    parser.add_argument("--out", type=pathlib.Path, help="write every outcome there, as JSON")
    options = parser.parse_args(arguments)
    seeds = list(range(options.seed, options.seed + options.runs))
    if options.seeds:
        seeds = [int(seed) for seed in options.seeds.split(",")]
    play = run_real if options.real else functools.partial(run, is_disturbed=not options.undisturbed)
    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        for outcome in pool.map(play, seeds):
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "right"
            killed = ", ".join(outcome.killed) or "nothing"
            print(
                f"seed {outcome.seed} ({outcome.searcher}): {killed}: {verdict} ({outcome.seconds:.0f} s)",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps([dataclasses.asdict(each) for each in outcomes], indent=1))
    num_right = sum(not outcome.problems for outcome in outcomes)
    print(f"\n{table(outcomes)}\n\n{num_right} of {len(outcomes)} runs ended right")
    return 0 if num_right == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
