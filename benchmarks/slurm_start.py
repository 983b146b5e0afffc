"""Seconds from a submission to Slurm to the first trained batch: ``dstrial run --slurm`` beside a batch script with bare srun.

A real Slurm over namespaces (``tests/hosts/slurm_cluster.py``), one rank on each of two nodes, ZeRO 1. The bare script is
``hosts_script.py``: plain DeepSpeed, with the address of rank 0 expanded by ``scontrol show hostnames``. Both alternate.

``python benchmarks/slurm_start.py --rounds 5 --json slurm_start.json``; needs root, sshd and Slurm's daemons.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

import yaml
from slurm_cluster import SlurmCluster, missing, slurm_cluster

_HERE = Path(__file__).parent
_ENVIRON = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
}
_LIMIT_S = 120.0
_BARE = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=bare.log
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1) MASTER_PORT=29655
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_SIZE=1 exec {python} {script}'
"""
_CONFIG = {
    "name": "small",
    "entrypoint": "small_trial:SmallTrial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "zero", "max_length": {"batches": 5}},
    "hyperparameters": {"zero_stage": 1, "pause_s": 0.0},
    "scheduling_unit": 1,
    "min_validation_period": {"batches": 1000},
}


def _wait_for(cluster: SlurmCluster, words: list[str], log: Path, said: str, cwd: Path) -> float:
    """Start a command, and return after how many seconds something stands in a file."""
    began_s = time.monotonic()
    with subprocess.Popen(
        cluster.machines[1].words(words, cwd),
        env={**cluster.env, **_ENVIRON},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    ) as program:
        while not (log.exists() and said in log.read_text(errors="replace")):
            if time.monotonic() > began_s + _LIMIT_S:
                raise SystemExit(
                    f"{words[0]} has not come to {said!r}: {log.read_text() if log.exists() else ''}"
                )
            time.sleep(0.02)
        seconds = time.monotonic() - began_s
        program.wait(_LIMIT_S)
    cluster.wait_for_idle(2, timeout=60)
    return seconds


def _measured(cluster: SlurmCluster, kind: str) -> float:
    with tempfile.TemporaryDirectory(prefix="slurm-start-", dir="/tmp") as name:
        place = Path(name)
        if kind == "bare srun":
            script = _BARE.format(python=sys.executable, script=_HERE / "hosts_script.py")
            (place / "bare.sh").write_text(script)
            return _wait_for(cluster, ["sbatch", "bare.sh"], place / "bare.log", ": step 0", place)
        shutil.copy(_HERE.parent / "tests" / "hosts" / "small_trial.py", place)
        (place / "exp.yaml").write_text(yaml.safe_dump(_CONFIG))
        words = [sys.executable, "-m", "dstrial", "run", "exp.yaml", ".", "--slurm", "--run-dir", "run"]
        flags = ["--sbatch-arg=--nodes=2", "--sbatch-arg=--ntasks-per-node=1"]
        return _wait_for(cluster, [*words, *flags], place / "run" / "slurm.log", "batch 1/5", place)


def main() -> None:
    """Measure both in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if lacking := missing():
        raise SystemExit(f"needs {lacking}")
    seconds: dict[str, list[float]] = {"bare srun": [], "dstrial run --slurm": []}
    with slurm_cluster(2) as cluster:
        for number in range(args.rounds):
            for kind in seconds:
                seconds[kind].append(_measured(cluster, kind))
                print(f"round {number + 1}: {kind}: {seconds[kind][-1]:.2f} s", flush=True)
    print(
        "\n| from the submission to the first batch | median s | least s | most s | ratio |\n|---|---|---|---|---|"
    )
    baseline = statistics.median(seconds["bare srun"])
    for kind, found in seconds.items():
        middle = statistics.median(found)
        print(f"| {kind} | {middle:.2f} | {min(found):.2f} | {max(found):.2f} | {middle / baseline:.2f} |")
    if args.json:
        args.json.write_text(json.dumps({"seconds": seconds, "cores": os.cpu_count()}, indent=1))


if __name__ == "__main__":
    main()
