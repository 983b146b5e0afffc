"""What ``dstrial run --slurm`` leaves behind where no job is followed; sbatch is a script of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

CONFIG = """
name: small
entrypoint: python3 train.py
searcher: {name: single, metric: loss, max_length: {batches: 1}}
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dstrial_command: Run) -> Run:
    """Return what submits a run to an sbatch that does this."""
    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "exp.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(commands), prepend=":")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def submit(sbatch: str, *flags: str, scontrol: str = "", sinfo: str = "") -> tuple[int, str, str]:
        sbatch = f'[ "$1" = --test-only ] && exit 0\n{sbatch}'
        for name, body in (
            ("sbatch", sbatch),
            ("squeue", ""),
            ("scontrol", scontrol),
            ("sinfo", sinfo),
            ("scancel", ""),
            ("srun", ""),
        ):
            (commands / name).write_text(f"#!/bin/sh\n{body}\n")
            (commands / name).chmod(0o755)
        return dstrial_command("run", "exp.yaml", ".", "--slurm", "--runs-dir", tmp_path / "runs", *flags)

    return submit


def test_a_refused_job_leaves_no_directory(run: Run, tmp_path: Path) -> None:
    code, _, errors = run("echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1")
    assert code == 1
    assert "invalid partition specified: nope" in errors
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("sbatch", "expected"),
    [
        pytest.param(
            "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1", 1, id="unanswered"
        ),
        pytest.param("kill -INT $PPID; exit 130", 130, id="ctrl-c"),
    ],
)
def test_a_job_that_may_be_queued_keeps_its_directory(
    run: Run, tmp_path: Path, sbatch: str, expected: int
) -> None:
    code, out, errors = run(sbatch)
    assert code == expected, errors
    (script,) = tmp_path.glob("runs/small/*/sbatch.sh")
    assert (
        f"A job may be queued all the same, and keeps {script.parent}; `squeue --me` shows it" in out + errors
    )


@pytest.mark.parametrize("option", ["--clusters=far", "-Mfar"])
def test_another_cluster_is_refused_before_anything_is_queued(run: Run, tmp_path: Path, option: str) -> None:
    code, _, errors = run("echo '123;far'", f"--sbatch-arg={option}")
    assert code == 1
    assert "is --clusters=far; expected a job of this machine's cluster" in errors
    assert not (tmp_path / "runs").exists()


_JOB = "JobId=12 JobState=PENDING Reason={} Restarts=0 ExitCode=0:0"


def test_a_reason_for_ever_counts_where_all_nodes_had_registered_before_it_was_asked(run: Run) -> None:
    # The last node registers between the reason and the look at nodes.
    late = f"[ -e known ] && echo '{_JOB.format('Resources')}' || echo '{_JOB.format('PartitionConfig')}'"
    code, said, errors = run("echo 12", "--detach", scontrol=late, sinfo="touch known; echo idle")
    assert code == 0, errors
    assert "job 12: queued" in said

    code, _, errors = run(
        "echo 12", "--detach", scontrol=f"echo '{_JOB.format('PartitionConfig')}'", sinfo="echo idle"
    )
    assert code == 1
    assert "would never start it: PartitionConfig: asks for more than its partition has; expected" in errors
