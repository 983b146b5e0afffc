"""Preempt, cut, kill, cancel and requeue small runs under a real Slurm at random moments.

Usage: ``python tests/hosts/chaos_of_slurm.py [--runs N] [--seed S] [--workers W]``

Every run has a cluster of three nodes of its own; its seed says what happens and when. ``dstrial run --slurm`` follows a job with
a rank on each of two nodes; where its job was cancelled or its processes were killed the same command is typed again. Afterwards
the run must be complete, with every report stored once and in order, each of batches of 12 records, a checkpoint at its end that
verifies, and nothing left on any node or in the queue.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import seeded_runs
import yaml
from chaos import CONFIG, WrongRunError, problems_of
from slurm_cluster import SlurmCluster, slurm_cluster

_DEADLINE_S = 300.0
_LEFT_S = 40.0
STRIKES = (
    "preempt", "cut", "cut and heal", "node", "launcher of a node", "rank", "batch", "follower", "cancel", "requeue",
    "controller",
)  # fmt: skip
_TYPED_AGAIN = {"batch", "follower", "cancel"}
_ENVIRON = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


class _Run:
    """One run, and the command that follows it."""

    def __init__(self, cluster: SlurmCluster, place: Path) -> None:
        self._cluster, self._place = cluster, place
        self._began_s = time.monotonic()
        self._lost: set[int] = set()
        self._log = place / "printed.log"
        self.directory = place / "runs" / "mine"
        self.command = self._typed()

    def _typed(self) -> subprocess.Popen[bytes]:
        words = ["run", "exp.yaml", ".", "--slurm", "--run-dir", str(self.directory)]
        nodes = ["--sbatch-arg=--nodes=2", "--sbatch-arg=--ntasks-per-node=1"]
        with self._log.open("ab") as log:
            return self._cluster.machines[1].popen(
                [sys.executable, "-m", "dstrial", *words, *nodes],
                cwd=self._place,
                env={**self._cluster.env, **_ENVIRON},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._began_s + _DEADLINE_S

    @property
    def is_complete(self) -> bool:
        try:
            record = json.loads((self.directory / "run.json").read_text())
        except (OSError, ValueError):
            return False
        return bool(record["state"] == "completed")

    def await_training(self, longer_s: float) -> None:
        """Wait until one checkpoint more is there, and a little longer."""
        pattern = "checkpoints/*/manifest.json"
        before = len(list(self.directory.glob(pattern)))
        while self.command.poll() is None and not self.is_late:
            if len(list(self.directory.glob(pattern))) > before:
                break
            time.sleep(0.05)
        time.sleep(longer_s)

    def strike(self, what: str, number: int) -> None:
        """Do it to a node, to the job, or to the command."""
        cluster, machine = self._cluster, self._cluster.machines[number]
        job = int(re.findall(r"job (\d+): queued", self.printed)[-1])
        if what in ("cut", "node") and not self._lost:
            self._lost.add(number)
            (machine.cut if what == "cut" else machine.kill)()
        elif what == "cut and heal" and number not in self._lost:
            machine.cut()
            time.sleep(5)
            machine.heal()
        elif what in ("launcher of a node", "rank") and number not in self._lost:
            pid = machine.find("dstrial.launch.node" if what != "rank" else "dstrial.launch.rank_main")
            if pid is not None:
                machine.signal(pid, signal.SIGKILL)
        elif what == "preempt":
            words = ["srun", "-p", "high", "-N1", "-n2", "-w", f"host{number}", "-t1", "sleep", "2"]
            if number not in self._lost:
                cluster.run("timeout", "40", *words, timeout=60)
        elif what in ("cancel", "requeue"):
            cluster.run(*(["scancel"] if what == "cancel" else ["scontrol", "requeue"]), str(job))
        elif what == "controller":
            pid = cluster.machines[1].find("slurmctld")
            if pid is not None:
                cluster.machines[1].signal(pid, signal.SIGKILL)
            time.sleep(4)
            cluster.start_controller()
        elif what in ("batch", "follower"):
            self._kill_command("--run-dir" if what == "batch" else "--sbatch-arg")

    def _kill_command(self, kind: str) -> None:
        for number, machine in enumerate(self._cluster.machines.all, 1):
            if number in self._lost:
                continue
            for pid, line in machine.processes().items():
                is_of_job = " --slots " in line and "-u -m dstrial" in line
                if "dstrial run exp.yaml" in line and is_of_job == (kind == "--run-dir"):
                    machine.signal(pid, signal.SIGKILL)

    def end(self, num_again: int) -> None:
        """Wait until the run is complete, and type the command again where that is due."""
        while True:
            try:
                code = self.command.wait(max(self._began_s + _DEADLINE_S - time.monotonic(), 1.0))
            except subprocess.TimeoutExpired:
                raise WrongRunError("it goes on for ever") from None
            while self._cluster.run("squeue", "-h").stdout.strip() and not self.is_late:
                time.sleep(0.5)  # the command was killed, and not its job
            if self.is_complete:
                return
            if num_again <= 0 or self.is_late:
                raise WrongRunError(f"exit code {code}")
            num_again -= 1
            self.command = self._typed()

    def close(self) -> None:
        if self.command.poll() is None:
            self.command.kill()
        self.command.wait()


def run(seed: int) -> tuple[list[str], float]:
    """Do one run; return what was done to it and how long it took, seconds.

    Raises:
        WrongRunError: with what is wrong.
    """
    chance = random.Random(seed)
    planned = [chance.choice(STRIKES) for _ in range(chance.choice((1, 1, 2)))]
    began_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as text,
        slurm_cluster(3, grace_s=20) as cluster,
    ):
        place = Path(text)
        shutil.copy(Path(__file__).with_name("small_trial.py"), place)
        (place / "exp.yaml").write_text(yaml.safe_dump({**CONFIG, "resources": {"slots_per_trial": 2}}))
        one = _Run(cluster, place)
        try:
            for strike in planned:
                one.await_training(chance.uniform(0.0, 6.0))
                if one.command.poll() is not None:
                    break
                one.strike(strike, chance.choice((2, 3)))
            one.end(sum(strike in _TYPED_AGAIN for strike in planned))
            problems = problems_of(one.directory) + _leftovers(cluster)
            if problems:
                raise WrongRunError("; ".join(problems))
        except WrongRunError as error:
            raise WrongRunError(f"{planned}: {error}\n{one.printed[-6000:]}") from None
        finally:
            one.close()
    return planned, time.monotonic() - began_s


def _leftovers(cluster: SlurmCluster) -> list[str]:
    give_up_at_s = time.monotonic() + _LEFT_S
    while True:
        left = [
            line
            for machine in cluster.machines.all
            for line in machine.processes().values()
            if "dstrial" in line  # of a node that is cut off Slurm leaves its own
        ]
        left += cluster.run("squeue", "-h").stdout.splitlines()
        if not left:
            return []
        if time.monotonic() > give_up_at_s:
            return [f"left: {left}"]
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(seeded_runs.main(run, __doc__))
