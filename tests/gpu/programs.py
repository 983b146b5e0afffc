"""Run a program of this directory in a new process, with the GPU and a timeout."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="Requires: [CUDA device]")


def environment(**variables):
    """Return an environment with this checkout on PYTHONPATH and the GPU visible."""
    paths = [
        str(ROOT / "tests"),
        str(ROOT / "tests" / "trainer"),
        str(ROOT),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), **variables}
    if "DS_ACCELERATOR" not in variables:
        environ.pop("DS_ACCELERATOR", None)
    return environ


def finish(command, tmp_path, timeout_s, **variables):
    """Run a command to its end; on a timeout, fail the test with its output."""
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        printed = [(text or b"").decode(errors="replace")[-8000:] for text in (error.stdout, error.stderr)]
        pytest.fail(f"{command} has not ended after {timeout_s} s\n" + "\n".join(printed))
    return done


def run(program, *arguments, tmp_path, timeout_s=120, **variables):
    """Run a program, which must succeed, and return its stdout."""
    command = [sys.executable, str(pathlib.Path(__file__).with_name(program)), *arguments]
    done = finish(command, tmp_path, timeout_s, **variables)
    assert done.returncode == 0, (
        f"exit status {done.returncode}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    )
    return done.stdout


def launch(program, num_ranks, *arguments, tmp_path, timeout_s=150, **variables):
    """Run a program by ``dstrial.launch``; return the ranks' output and exit status."""
    script = str(pathlib.Path(__file__).with_name(program))
    command = [sys.executable, "-m", "dstrial.launch", "--slots", str(num_ranks), script, *arguments]
    done = finish(command, tmp_path, timeout_s, OMP_NUM_THREADS="1", **variables)
    return done.stdout + done.stderr, done.returncode


def facts(printed):
    """Return the facts that a program printed by ``text_runs.print_facts``."""
    found = {}
    for line in printed.splitlines():
        if "facts: " in line:
            found.update(json.loads(line.partition("facts: ")[2]))
    return found


def reports(client, trial_id, group):
    """Return the metrics of each report of a trial."""
    path = f"/api/v1/trials/metrics/trial_metrics?group={group}&trialIds={trial_id}"
    return [
        one["metrics"].get("avg_metrics", one["metrics"])
        for line in client.stream(path)
        for one in line["metrics"]
    ]
