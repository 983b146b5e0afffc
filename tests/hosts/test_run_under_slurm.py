"""``dstrial run --slurm`` on a cluster: submission, requeue, cancel and failures."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hosts_runs import CONFIG as HOSTS_CONFIG
from hosts_runs import ENVIRON, Dstrial, batches, copy_into, losses
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


TWO_NODES = ("--sbatch-arg=--nodes=2", "--sbatch-arg=--ntasks-per-node=1")
CONFIG = {**HOSTS_CONFIG, "resources": {"slots_per_trial": 2}}


class SlurmRun(Dstrial):
    """A ``dstrial run --slurm`` command in directory ``place`` on the first node."""

    def __init__(
        self,
        cluster: SlurmCluster,
        place: Path,
        *flags: str,
        batches: int = 20,
        pause_s: float = 0.0,
    ) -> None:
        self._cluster = cluster
        settings = [
            "--config",
            f"searcher.max_length.batches={batches}",
            "--config",
            f"hyperparameters.pause_s={pause_s}",
        ]
        words = ["run", "exp.yaml", ".", "--slurm", *settings, *flags]
        super().__init__(cluster.machines[1], place, *words, env=cluster.env)

    @property
    def job_id(self) -> int:
        return int(re.findall(r"job (\d+): queued", self.text)[0])

    def interrupt(self) -> None:
        """Send SIGINT to dstrial itself, not to the local ``nsenter``."""
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


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3, grace_s=20) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path, cluster: SlurmCluster) -> Iterator[Path]:
    """Return a directory with trial and config; teardown cancels all jobs."""
    place = tmp_path / """John's "place" #1, 100%"""  # characters that need quoting
    place.mkdir()
    copy_into(place, "small_trial.py")
    (place / "exp.yaml").write_text(yaml.safe_dump(CONFIG))
    yield place
    cluster.run("scancel", "--user=root")
    cluster.wait_for_idle(3, timeout=60)


def test_two_nodes_bitwise_equal_to_single_node(cluster: SlurmCluster, place: Path) -> None:
    overrides = ["--config", "hyperparameters.zero_stage=3"]
    code, two = SlurmRun(cluster, place, *overrides, *TWO_NODES).end()
    assert code == 0, two
    assert "host2: 1 slot at 10.77.0.12" in two
    code, one = SlurmRun(cluster, place, *overrides, "--sbatch-arg=--nodes=1").end()
    assert code == 0, one
    assert "2 slots at" in one
    assert len(losses(one)) == 4
    assert losses(one) == losses(two)


def test_print_sbatch_equals_submitted_script(cluster: SlurmCluster, place: Path) -> None:
    code, shown = SlurmRun(cluster, place, "--print-sbatch", *TWO_NODES).end()
    assert code == 0, shown
    assert not (place / "runs").exists(), "showing leaves nothing"
    run = SlurmRun(cluster, place, *TWO_NODES)
    code, text = run.end()
    assert code == 0, text
    directory = run_directory(place)
    submitted = (directory / "sbatch.sh").read_text()
    own = re.compile(r"runs/small/\w+-\w+")
    assert own.sub("RUN", shown) == own.sub("RUN", submitted).replace(" --print-sbatch", "")
    assert submitted.startswith("#!/bin/bash\n")
    assert json.loads((directory / "slurm.json").read_text()) == {"job_id": run.job_id}
    assert (directory / "slurm.log").read_text().count("state:         completed") == 1


def test_preempted_job_resumes_without_repeated_batches(cluster: SlurmCluster, place: Path) -> None:
    run = SlurmRun(cluster, place, *TWO_NODES, batches=50, pause_s=0.2)
    run.wait_for("batch 15 loss")
    urgent = cluster.popen(["srun", "-p", "high", "-N3", "-n6", "sleep", "2"])
    code, text = run.end()
    urgent.communicate(timeout=60)

    assert code == 0, text
    assert batches(text) == list(range(5, 51, 5)), "each position once"
    assert "(Slurm gives its nodes to another job)" in text
    assert f"job {run.job_id} is queued again" in text
    assert "resume with:" not in text
    assert "resuming from checkpoint" in text


def test_job_at_time_limit_saved_and_requeued(cluster: SlurmCluster, place: Path) -> None:
    run = SlurmRun(cluster, place, *TWO_NODES, "--sbatch-arg=--time=2", batches=2000, pause_s=0.2)
    run.wait_for("is queued again, because its time is over", within_s=150)
    run.wait_for("resuming from checkpoint", within_s=60)
    run.wait_for(f"batch {batches(run.text)[-1] + 5} loss")
    run.interrupt()
    code, text = run.end()
    numbers = batches(text)
    assert numbers == list(range(5, numbers[-1] + 1, 5)), "each position once"
    assert "stopped, as asked" in text
    assert code == 128 + signal.SIGTERM


def test_job_without_checkpoint_is_not_requeued(cluster: SlurmCluster, place: Path) -> None:
    # The first batch takes longer than the preemption timeout.
    run = SlurmRun(cluster, place, "--config", "preemption_timeout=3", batches=2, pause_s=600.0)
    run.wait_for("training the first batch")
    # The signal that Slurm sends before the time limit (--signal).
    cluster.run("scancel", "--signal=USR1", "--batch", str(run.job_id))
    code, text = run.end()
    assert code == 1
    assert "has saved no checkpoint: ask for more time" in text, text
    assert "queued again" not in text


def test_cancelled_job_saves_and_resumes_on_request(cluster: SlurmCluster, place: Path) -> None:
    run = SlurmRun(cluster, place, *TWO_NODES, batches=40, pause_s=0.2)
    run.wait_for("batch 15 loss")
    cluster.run("scancel", str(run.job_id))
    code, text = run.end()
    assert code == 128 + signal.SIGTERM
    assert "stopped at batch" in text
    assert f"job {run.job_id}: cancelled" in text
    last = batches(text)[-1]

    code, text = SlurmRun(cluster, place, *TWO_NODES, "--resume", "latest", batches=40).end()
    assert code == 0, text
    assert batches(text) == list(range(last + 5, 41, 5))
    assert len(list((place / "runs" / "small").iterdir())) == 1, "the same run goes on"


def test_run_continues_after_node_loss(cluster: SlurmCluster, place: Path) -> None:
    run = SlurmRun(cluster, place, *TWO_NODES, batches=60, pause_s=0.2)
    run.wait_for("batch 15 loss")
    cluster.machines[2].cut()
    try:
        run.wait_for("host2 (rank 1) is silent for 5 s", within_s=30)
        run.wait_for("allocation lost: host2 is ", within_s=60)
        code, text = run.end()
    finally:
        cluster.heal(2)
    assert code == 0, text
    # When the node is down, Slurm requeues the job, which resumes on two nodes from a checkpoint.
    lines = (run_directory(place) / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["group"] == "training"]
    assert [row["steps_completed"] for row in rows] == list(range(5, 61, 5)), text
    sizes = {
        round(row["metrics"]["samples_per_second"] / row["metrics"]["batches_per_second"]) for row in rows
    }
    assert sizes == {12}, "the same global batch on one node and on two"


def test_run_with_unequal_slots_per_node_completes(cluster: SlurmCluster, place: Path) -> None:
    settings = ["--config", "+hyperparameters.micro_batch_size=4"]
    code, text = SlurmRun(cluster, place, *settings, "--slots", "3").end()
    assert code == 0, text
    assert "2 slots at" in text
    assert "1 slot at" in text


def test_run_inside_allocation_submits_no_job(cluster: SlurmCluster, place: Path) -> None:
    command = [sys.executable, "-m", "dstrial", "run", "exp.yaml", ".", "--slurm"]
    done = cluster.run("salloc", "-N2", "--ntasks-per-node=1", *command, cwd=place, env=ENVIRON, timeout=100)
    assert "state:         completed at batch 20 of 20" in done.stdout
    assert "host2: 1 slot at 10.77.0.12" in done.stdout
    assert not list(run_directory(place).glob("sbatch.sh"))
    # A run inside one of several srun tasks is rejected.
    command = ["srun", "-n2", *command]
    done = cluster.run("salloc", "-n2", *command, cwd=place, env=ENVIRON, timeout=60)
    assert "this is one of 2 tasks of srun" in done.stdout


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--sbatch-arg=--partition=nope",), "Invalid partition name specified. Name one that `sinfo` lists"),
        (("--slots", "100"), "Requested node configuration is not available. Ask for fewer slots"),
        (("--sbatch-arg=--gres=gpu:8",), "Ask for accelerators that the partition has"),
        (("--sbatch-arg=--frobnicate",), "Correct slurm.sbatch_args"),
        (("--slots", "3", "--config", "slurm.slots_per_node=2"), "a number of which 3 slots are a multiple"),
        (("--hostfile", "hosts"), "Leave --hostfile out: Slurm names the nodes."),
    ],
)
def test_invalid_run_rejected_without_queued_job(
    cluster: SlurmCluster, place: Path, flags: tuple[str, ...], said: str
) -> None:
    code, text = SlurmRun(cluster, place, *flags).end(30)
    assert code == 1, text
    assert said in text
    assert cluster.run("squeue", "-h").stdout == ""
    assert not (place / "runs").exists()


def test_node_without_python_or_directory_is_named(cluster: SlurmCluster, place: Path) -> None:
    code, text = SlurmRun(cluster, place, "--python", "/opt/nowhere/bin/python", "--sbatch-arg=-w host2").end(
        60
    )
    assert code == 127, text
    assert "exit code 127" in text

    cluster.machines[2].hide(place)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: cluster.machines[2].run(["umount", str(place)], cwd="/"))
        code, text = SlurmRun(cluster, place, "--sbatch-arg=-w host2").end(60)
        assert code != 0
        assert "does the node see it?" in text, text
        code, text = SlurmRun(cluster, place, *TWO_NODES, "--sbatch-arg=-w host1,host2").end(60)
        assert code != 0
        assert "runs/small than on host1" in text, text
