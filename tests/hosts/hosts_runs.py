"""Config, files and output of the small trial of these tests."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from machines import Machine

ENVIRON = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
CONFIG: dict[str, Any] = {
    "name": "small",
    "entrypoint": "small_trial:SmallTrial",
    "searcher": {"name": "single", "metric": "zero", "max_length": {"batches": 20}},
    "hyperparameters": {"zero_stage": 1, "pause_s": 0.0},
    "scheduling_unit": 5,
    "min_validation_period": {"batches": 1000},
    "min_checkpoint_period": {"batches": 10},
    "max_restarts": 2,
}
_TIMEOUT_FACTOR = 2.0  # factor for all timeouts, because other tests load the CPU


class Dstrial:
    """A ``dstrial`` command that runs on a machine; ``text`` is its output so far."""

    def __init__(self, machine: Machine, place: Path, *words: str, env: Mapping[str, str]) -> None:
        self._log = place / "printed.log"
        with self._log.open("wb") as log:
            self.process = machine.popen(
                [sys.executable, "-m", "dstrial", *words],
                cwd=place,
                env={**env, **ENVIRON},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, words: str, within_s: float = 90.0) -> None:
        give_up_at_s = time.monotonic() + _TIMEOUT_FACTOR * within_s
        while words not in self.text:
            assert time.monotonic() < give_up_at_s, f"{words!r} is not in:\n{self.text}"
            assert self.process.poll() is None or words in self.text, (
                f"it ended without {words!r}:\n{self.text}"
            )
            time.sleep(0.1)

    def end(self, within_s: float = 120.0) -> tuple[int, str]:
        """Wait for the command to end; return its exit code and output."""
        try:
            code = self.process.wait(_TIMEOUT_FACTOR * within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it has not ended in {within_s} s:\n{self.text}") from None
        return code, self.text


def copy_into(directory: Path, *names: str) -> Path:
    for name in names:
        shutil.copy(Path(__file__).parent / name, directory)
    return directory


def losses(text: str) -> list[str]:
    return re.findall(r"batch \d+ loss 0x\S+", text)


def batches(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"batch (\d+) loss ", text)]
