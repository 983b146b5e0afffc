"""``dstrial run --slurm`` on the first node of a cluster, which stands for a login node, and what it has printed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import hosts_runs
from hosts_runs import ENVIRON
from slurm_cluster import SlurmCluster

TWO_NODES = ("--sbatch-arg=--nodes=2", "--sbatch-arg=--ntasks-per-node=1")
CONFIG = {**hosts_runs.CONFIG, "resources": {"slots_per_trial": 2}}
_PATIENCE = 2.0  # times what a test asks for, where other tests keep the processors busy
_LOOK_S = 0.1


class SlurmRun:
    """A command typed in ``place`` on the first node of a cluster, with ``flags``."""

    def __init__(
        self,
        cluster: SlurmCluster,
        place: Path,
        *flags: str,
        batches: int = 20,
        pause_s: float = 0.0,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster, self._log = cluster, place / "printed.log"
        settings = [
            "--config",
            f"searcher.max_length.batches={batches}",
            "--config",
            f"hyperparameters.pause_s={pause_s}",
        ]
        words = ["run", "exp.yaml", ".", "--slurm", *settings, *flags]
        with self._log.open("wb") as log:
            self.process = cluster.machines[1].popen(
                [sys.executable, "-m", "dstrial", *words],
                cwd=place,
                env={**cluster.env, **ENVIRON, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def job_id(self) -> int:
        return int(re.findall(r"job (\d+): queued", self.text)[0])

    def wait_for(self, words: str, within_s: float = 90.0) -> None:
        give_up_at_s = time.monotonic() + _PATIENCE * within_s
        while words not in self.text:
            assert time.monotonic() < give_up_at_s, f"{words!r} is not in:\n{self.text}"
            assert self.process.poll() is None, f"it ended without {words!r}:\n{self.text}"
            time.sleep(_LOOK_S)

    def interrupt(self) -> None:
        """Send it SIGINT, past nsenter, which is the process here."""
        machine = self._cluster.machines[1]
        (pid,) = (
            pid
            for pid, line in machine.processes().items()
            if "dstrial run exp.yaml" in line and "--run-dir" not in line
        )
        machine.signal(pid, signal.SIGINT)

    def end(self, within_s: float = 120.0) -> tuple[int, str]:
        try:
            code = self.process.wait(_PATIENCE * within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it has not ended in {within_s} s:\n{self.text}") from None
        return code, self.text


def run_directory(place: Path) -> Path:
    (found,) = (place / "runs" / "small").iterdir()
    return found
