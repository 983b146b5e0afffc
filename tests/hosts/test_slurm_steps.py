"""``srun python train.py`` finds its ranks for every task layout; a Slurm cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import hosts_runs
import pytest
import yaml
from hosts_runs import ENVIRON, copy_into, losses
from slurm_cluster import SlurmCluster, slurm_cluster

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
_ENVIRON = {**ENVIRON, "DSTRIAL_TIMEOUT_S": "60", "MICRO": "3"}
CONFIG = {**hosts_runs.CONFIG, "hyperparameters": {"zero_stage": 1, "pause_s": 0.0, "micro_batch_size": 3}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(3) as made:
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return copy_into(tmp_path, "small_trial.py", "small_script.py")


def _places(text: str) -> list[str]:
    """Return "HOST LOCAL_RANK/LOCAL_SIZE" of each rank, in rank order."""
    found = re.findall(r"rank (\d+)/\d+ local (\d+)/(\d+) node (\d+)/\d+ on (\S+)", text)
    return [
        f"{host} {local}/{size}" for _, local, size, _, host in sorted(found, key=lambda one: int(one[0]))
    ]


@pytest.fixture(scope="module")
def losses_here(cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses that four ranks on one machine print."""
    place = copy_into(tmp_path_factory.mktemp("here"), "small_trial.py", "small_script.py")
    found = losses(_srun(cluster, place, sys.executable, "-m", "dstrial.launch", "--slots", "4"))
    assert len(found) == 4
    return found


def _said(cluster: SlurmCluster, place: Path, *words: str) -> str:
    said = cluster.run("timeout", "100", *words, cwd=place, env=_ENVIRON, timeout=120)
    assert said.returncode == 0, said.stdout
    return said.stdout


def _srun(
    cluster: SlurmCluster, place: Path, *words: str, script: tuple[str, ...] = ("run", "20", "1")
) -> str:
    python = [] if "dstrial.launch" in words else [sys.executable]
    return _said(cluster, place, *words, *python, "small_script.py", *script)


_LAUNCH = "python -m dstrial.launch"
_STEPS = {
    "srun -N2 -n4 --ntasks-per-node=2": ["host1 0/2", "host1 1/2", "host2 0/2", "host2 1/2"],
    "srun -N3 -n4 -m cyclic": ["host1 0/2", "host2 0/1", "host3 0/1", "host1 1/2"],
    # Heterogeneous steps, in which rank 0 is not on the first node of Slurm's list.
    "salloc -Q -N3 --ntasks-per-node=2 env MASTER_ADDR=host3 srun -N1 -n1 -w host3 : -N2 -n3 -w host1,host2": [
        "host3 0/1", "host1 0/2", "host1 1/2", "host2 0/1",
    ],
    # dstrial.launch: one launcher per node, or one per task.
    f"srun -N2 --ntasks-per-node=1 {_LAUNCH} --slots 4": ["host1 0/2", "host1 1/2", "host2 0/2", "host2 1/2"],
}  # fmt: skip


@pytest.mark.parametrize("step", _STEPS)
def test_srun_layouts_losses_equal_single_machine(
    cluster: SlurmCluster, place: Path, losses_here: list[str], step: str
) -> None:
    words = [sys.executable if word == "python" else word for word in step.split()]
    said = _srun(cluster, place, *words)
    assert _places(said) == _STEPS[step]
    assert losses(said) == losses_here


def test_launcher_per_node_trains_trial_class(
    cluster: SlurmCluster, place: Path, losses_here: list[str]
) -> None:
    (place / "exp.yaml").write_text(yaml.safe_dump(CONFIG))
    flags = ["--config", "exp.yaml", "--trial", "small_trial:SmallTrial"]
    words = ["srun", "-N2", sys.executable, "-m", "dstrial.launch", "--slots", "4", *flags]
    assert losses(_said(cluster, place, *words)) == losses_here


def test_indivisible_slots_rejected_before_ranks_start(cluster: SlurmCluster, place: Path) -> None:
    launch = [sys.executable, "-m", "dstrial.launch", "--slots", "3", "small_script.py"]
    for words, told in (
        (["srun", "-N2"], "one task on each of 2 nodes; expected a multiple of 2."),
        (
            ["srun", "-N2", "-n4"],
            "a step of Slurm with 4 tasks on 2 node(s), each of which is a rank; expected as many.",
        ),
    ):
        said = cluster.run(*words, *launch, cwd=place, env=_ENVIRON)
        assert said.returncode != 0
        assert told in said.stdout
    assert not (place / "runs").exists()


def test_same_script_starts_and_resumes_run(cluster: SlurmCluster, place: Path) -> None:
    first = _srun(cluster, place, "srun", "-N2", "-n4", script=("runs/mine", "10", "1"))
    rest = _srun(cluster, place, "srun", "-N2", "-n4", script=("runs/mine", "20", "1"))
    whole = _srun(cluster, place, "srun", "-N2", "-n4", script=("runs/other", "20", "1"))
    assert losses(first) + losses(rest) == losses(whole)
    assert len(losses(rest)) == 2


def test_unshared_run_directory_error_names_node(cluster: SlurmCluster, place: Path) -> None:
    (place / "own").mkdir()
    cluster.machines[2].hide(place / "own")
    words = ["srun", "-N2", "-n2", "--kill-on-bad-exit=1", sys.executable, "small_script.py"]
    said = cluster.run(*words, "own/run", "20", "1", cwd=place, env={**_ENVIRON, "MICRO": "6"})
    assert said.returncode != 0
    assert f"the run directory {place}/own/run, which rank 0 has made, is not on host2" in said.stdout
