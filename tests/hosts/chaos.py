"""Cut cables and kill hosts, launchers, ranks and the command itself at random moments of small runs over three hosts.

Usage: ``python tests/hosts/chaos.py [--runs N] [--seed S] [--workers W]``

Every run has machines of its own; its seed says what happens and when. The command runs on host1, a rank on each host; a command
that was killed is typed again with ``--resume latest``. Afterwards the run must be complete, with every report stored once and in
order, each of batches of 12 records on however many hosts were left, a checkpoint at its end that verifies, and no process on any
host.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import seeded_runs
import yaml
from machines import Machines, machines

NUM_BATCHES = 120
_DEADLINE_S = 240.0
_LEFT_S = 30.0
STRIKES = ("cut", "cut and heal", "host", "launcher of a host", "rank", "command")
_ENVIRON = ["env", "DS_ACCELERATOR=cpu", "PYTHONPATH=", "PYTHONUNBUFFERED=1"]
CONFIG = {
    "name": "chaos",
    "entrypoint": "small_trial:SmallTrial",
    "searcher": {"name": "single", "metric": "zero", "max_length": {"batches": NUM_BATCHES}},
    "hyperparameters": {
        "zero_stage": 1,
        "pause_s": 0.1,
        "micro_batch_size": 2,
    },
    "scheduling_unit": 5,
    "min_validation_period": {"batches": 1000},
    "min_checkpoint_period": {"batches": 10},
    "max_restarts": 8,
}


class WrongRunError(Exception):
    """A run did not end as it has to."""


def run(seed: int) -> tuple[list[str], float]:
    """Do one run; return what was done to it and how long it took, seconds.

    Raises:
        WrongRunError: with what is wrong.
    """
    chance = random.Random(seed)
    planned = [chance.choice(STRIKES) for _ in range(chance.choice((1, 1, 2)))]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as text, machines(3) as three:
        place = Path(text)
        shutil.copy(Path(__file__).with_name("small_trial.py"), place)
        (place / "exp.yaml").write_text(yaml.safe_dump(CONFIG))
        three.hostfile(place / "hosts")
        lost: set[int] = set()
        command = _start(three, place)
        for strike in planned:
            _await_training(command, place, chance.uniform(0.0, 6.0), began_s)
            if command.poll() is not None:
                break
            command = _strike(strike, chance.choice((2, 3)), three, place, command, lost)
        try:
            code = command.wait(max(began_s + _DEADLINE_S - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            raise WrongRunError(f"{planned}: it goes on for ever\n{_printed(place)}") from None
        if code:
            raise WrongRunError(f"{planned}: exit code {code}\n{_printed(place)}")
        (directory,) = place.glob("runs/*/*")
        problems = problems_of(directory) + _leftovers(three)
        if problems:
            raise WrongRunError(f"{planned}: {'; '.join(problems)}\n{_printed(place)}")
    return planned, time.monotonic() - began_s


def _start(three: Machines, place: Path, *more: str) -> subprocess.Popen[bytes]:
    words = ["run", "exp.yaml", ".", "--no-progress", "--hostfile", "hosts", *more]
    with (place / "printed.log").open("ab") as log:
        return three[1].popen(
            [*_ENVIRON, sys.executable, "-m", "dstrial.cli", *words],
            cwd=place, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _printed(place: Path) -> str:
    return (place / "printed.log").read_text(errors="replace")[-4000:]


def _await_training(command: subprocess.Popen[bytes], place: Path, longer_s: float, began_s: float) -> None:
    """Wait until one checkpoint more is there, and a little longer."""
    before = len(list(place.glob("runs/*/*/checkpoints/*/manifest.json")))
    while command.poll() is None and time.monotonic() - began_s < _DEADLINE_S:
        if len(list(place.glob("runs/*/*/checkpoints/*/manifest.json"))) > before:
            break
        time.sleep(0.05)
    time.sleep(longer_s)


def _strike(
    what: str,
    number: int,
    three: Machines,
    place: Path,
    command: subprocess.Popen[bytes],
    lost: set[int],
) -> subprocess.Popen[bytes]:
    """Do it to a host, or to the command, which is then typed again; return the command that runs."""
    machine = three[number]
    if what in ("cut", "host") and not lost:
        lost.add(number)
        (machine.cut if what == "cut" else machine.kill)()
    elif what == "cut and heal" and number not in lost:
        machine.cut()
        time.sleep(5)
        machine.heal()
    elif what in ("launcher of a host", "rank") and number not in lost:
        pid = machine.find("dstrial.launch.node" if what != "rank" else "dstrial.launch.rank_main")
        if pid is not None:
            machine.signal(pid, signal.SIGKILL)
    elif what == "command":
        pid = three[1].find("dstrial.cli", "run")
        if pid is not None:
            three[1].signal(pid, signal.SIGKILL)
        command.wait()
        give_up_at_s = time.monotonic() + _LEFT_S
        while three.processes() and time.monotonic() < give_up_at_s:
            time.sleep(0.2)
        left = ["--exclude", "@".join(f"host{one}" for one in sorted(lost))] if lost else []
        slots = ["--slots", "2"] if lost else []
        return _start(three, place, "--resume", "latest", *left, *slots)
    return command


def problems_of(directory: Path) -> list[str]:
    """Return what is wrong with a run of ``CONFIG`` that has ended."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["steps_completed"] for line in lines if line.get("group") == "training"]
    found = []
    if steps != list(range(5, NUM_BATCHES + 1, 5)):
        found.append(f"reports at {steps}")
    metrics = [line["metrics"] for line in lines if line.get("group") == "training"]
    batches = {round(one["samples_per_second"] / one["batches_per_second"], 6) for one in metrics}
    if batches != {12.0}:
        found.append(f"batches of {batches} records")
    newest = max(
        (path for path in directory.glob("checkpoints/*") if path.is_dir()),
        key=lambda one: one.stat().st_mtime,
    )
    words = [sys.executable, "-m", "dstrial.cli", "checkpoint", "verify", str(newest)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        found.append(f"{newest.name} does not verify")
    return found


def _leftovers(three: Machines) -> list[str]:
    give_up_at_s = time.monotonic() + _LEFT_S
    while left := three.processes():
        if time.monotonic() > give_up_at_s:
            return [f"left: {left}"]
        time.sleep(0.2)
    return []


if __name__ == "__main__":
    sys.exit(seeded_runs.main(run, __doc__))
