"""``dstrial run --slurm`` on the first node of a cluster, which stands for a login node, and what it has printed."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import hosts_runs
from hosts_runs import Dstrial
from slurm_cluster import SlurmCluster

TWO_NODES = ("--sbatch-arg=--nodes=2", "--sbatch-arg=--ntasks-per-node=1")
CONFIG = {**hosts_runs.CONFIG, "resources": {"slots_per_trial": 2}}


class SlurmRun(Dstrial):
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
        self._cluster = cluster
        settings = [
            "--config",
            f"searcher.max_length.batches={batches}",
            "--config",
            f"hyperparameters.pause_s={pause_s}",
        ]
        words = ["run", "exp.yaml", ".", "--slurm", *settings, *flags]
        super().__init__(cluster.machines[1], place, *words, env={**cluster.env, **(more or {})})

    @property
    def job_id(self) -> int:
        return int(re.findall(r"job (\d+): queued", self.text)[0])

    def interrupt(self) -> None:
        """Send it SIGINT, past nsenter, which is the process here."""
        machine = self._cluster.machines[1]
        (pid,) = (
            pid
            for pid, line in machine.processes().items()
            if "dstrial run exp.yaml" in line and "--run-dir" not in line
        )
        machine.signal(pid, signal.SIGINT)


def run_directory(place: Path) -> Path:
    (found,) = (place / "runs" / "small").iterdir()
    return found
