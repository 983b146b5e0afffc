"""Launches a program of two ranks one of which holds the other up, and says what the launcher tells of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import warm_start
import yaml


def launch_stalling(
    directory: Path, program: Path, attack: str, experiment: Mapping[str, Any], *, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Launch ``program`` with the word ``attack``; its ranks are ended ``timeout`` seconds after they went on last."""
    shutil.copy(program, directory)
    whole = {
        "name": "stalling",
        "entrypoint": f"python3 -m dstrial.launch {program.name}",
        **experiment,
        "data": {"dstrial": {"stall_timeout": timeout, "stall_action": "restart"}},
    }
    (directory / "e.yaml").write_text(yaml.safe_dump(whole))
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "DSTRIAL_"))
    }
    return warm_start.run(
        ["dstrial.launch", "--config", "e.yaml", "--slots", "2", program.name, attack],
        cwd=directory,
        env={**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        timeout=300,
        is_merged=True,
    )


def line_of(run: subprocess.CompletedProcess[str]) -> str:
    """Return the line on the stall for which a launch was ended."""
    assert run.returncode == 1, run.stdout
    (line,) = re.findall("dstrial.launch: (stalled: .*Nothing has moved.*)", run.stdout)
    return str(line)


def require_stopped_rank(run: subprocess.CompletedProcess[str]) -> None:
    """Require that rank 1 is named, which has stopped itself at batch 4."""
    assert line_of(run).startswith(
        "stalled: rank 1 is stopped (SIGSTOP) at batch 4 in train_batch; rank 0 waits for it in a collective (all"
    )
    assert "rank 1 failed first" in run.stdout


def require_left_out_collective(run: subprocess.CompletedProcess[str], place: str) -> None:
    """Require that both places are named, of which that of rank 0 is in ``place``."""
    line = line_of(run)
    assert f"rank 0 is in barrier of {place}:" in line
    assert "rank 1 is in all" in line
    assert "left a collective out" in line


def require_silent_loader(run: subprocess.CompletedProcess[str], program: Path) -> None:
    """Require that the loader of rank 1 is named, which never answers."""
    line = line_of(run)
    assert line.startswith("stalled: rank 1 waits for its data loader at batch 4 in train_batch")
    assert f"in read_from_storage ({program.name}:" in line
    assert "rank 0 waits for it in a collective" in line
    assert "rank 1 failed first" in run.stdout
