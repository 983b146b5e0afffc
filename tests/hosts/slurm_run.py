"""``dstrial run --slurm`` on the first node of a cluster, which stands for a login node, and what it has printed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurm_cluster import SlurmCluster

ENVIRON = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
TWO_NODES = ("--sbatch-arg=--nodes=2", "--sbatch-arg=--ntasks-per-node=1")
CONFIG: dict[str, Any] = {
    "name": "small",
    "entrypoint": "small_trial:SmallTrial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "zero", "max_length": {"batches": 20}},
    "hyperparameters": {"zero_stage": 1, "pause_s": 0.0},
    "scheduling_unit": 5,
    "min_validation_period": {"batches": 1000},
    "min_checkpoint_period": {"batches": 10},
    "max_restarts": 2,
}
_PATIENCE = 2.0  # times what a test asks for, where other tests keep the processors busy
_LOOK_S = 0.1


class SlurmRun:
    """One command.

    Args:
        cluster: on whose first node it is typed.
        place: a directory with ``exp.yaml`` and the trial, in which it is typed.
        flags: of it.
        batches: to train.
        pause_s: of each micro batch.
        more: variables of its environment.
    """

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
        """What it has printed."""
        return self._log.read_text(errors="replace")

    @property
    def job_id(self) -> int:
        """The number of its job."""
        return int(re.findall(r"job (\d+): queued", self.text)[0])

    def wait_for(self, words: str, within_s: float = 90.0) -> None:
        """Wait until it has printed something."""
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
        """Wait for its end; return its exit code and what it has printed."""
        try:
            code = self.process.wait(_PATIENCE * within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it has not ended in {within_s} s:\n{self.text}") from None
        return code, self.text


def run_directory(place: Path) -> Path:
    """Return the directory of the one run there is."""
    (found,) = (place / "runs" / "small").iterdir()
    return found
