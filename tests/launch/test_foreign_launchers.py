"""Ranks read rank and world size from the variables of common launchers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_start

pytestmark = pytest.mark.process

SCRIPT = """
import dataclasses, json, os, pathlib, sys
from dstrial.ranks.control_channel import ControlChannel
from dstrial.ranks.identity import identify
from dstrial.ranks.process_group import init_process_group, shutdown
identity = identify(os.environ)
init_process_group(identity, timeout_s=60)
channel = ControlChannel(identity)
total = sum(channel.allgather(identity.rank + 1))
channel.close()
shutdown()
told = dataclasses.asdict(identity) | {"total": total}
pathlib.Path(sys.argv[1], f"{identity.rank}.json").write_text(json.dumps(told))
"""


def _run(command: list[str], directory: Path, **variables: str) -> list[dict[str, Any]]:
    script = directory / "who.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **variables}
    result = warm_start.run_command(
        [*command, str(script), str(directory)],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    told: list[dict[str, Any]] = [json.loads(p.read_text()) for p in sorted(directory.glob("*.json"))]
    assert [(t["rank"], t["local_rank"], t["world_size"], t["local_world_size"]) for t in told] == [
        (0, 0, 2, 2),
        (1, 1, 2, 2),
    ]
    assert [(t["node_rank"], t["num_nodes"], t["total"]) for t in told] == [(0, 1, 3)] * 2
    return told


def test_rank_identity_under_dstrial_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dstrial.launch", "--slots", "2"]
    assert {t["launcher"] for t in _run(command, tmp_path)} == {"torchrun"}


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="Requires: [mpiexec]")
def test_rank_identity_under_mpiexec(tmp_path: Path) -> None:
    command = ["mpiexec", "-n", "2", sys.executable]
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    oversubscribe = {
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    assert {t["launcher"] for t in _run(command, tmp_path, **allow, **oversubscribe)} <= {"openmpi"}
