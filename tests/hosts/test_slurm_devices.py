"""Devices of Slurm steps, by the job's options; a cluster with fake GPUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster

from dstrial.hosts.srun import SrunTransport
from dstrial.slurm.script import request_lines

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]
_SHOW = 'echo "$SLURMD_NODENAME has $CUDA_VISIBLE_DEVICES"'


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(2, gpus=2) as made:
        yield made


@pytest.fixture
def job(cluster: SlurmCluster) -> Iterator[list[int]]:
    """Return a list for job ids, which are cancelled after the test."""
    made: list[int] = []
    yield made
    for number in made:
        cluster.run("scancel", str(number))
    cluster.wait_for_idle(2, timeout=60)


def _begin(cluster: SlurmCluster, options: list[str]) -> int:
    said = cluster.run("sbatch", "--parsable", "--output=/dev/null", *options, "--wrap=sleep 300").stdout
    cluster.wait_for_state(int(said), "RUNNING")
    return int(said)


def _step(cluster: SlurmCluster, transport: SrunTransport, host: str) -> list[str]:
    words = transport.words(host, sys.executable)
    return ["timeout", "30", *words[: words.index(sys.executable)], "sh", "-c"]


@pytest.mark.parametrize(
    ("num_slots", "settings", "options", "counts"),
    [
        (4, {}, [], {"host1": 2, "host2": 2}),
        (3, {}, [], {"host1": 2, "host2": 1}),
        (2, {"slots_per_node": 1}, [], {"host1": 1, "host2": 1}),
        (4, {}, ["--gpus=4"], {"host1": 2, "host2": 2}),
        (4, {"slots_per_node": 2}, ["--gpus-per-node=2"], {"host1": 2, "host2": 2}),
        (4, {"slots_per_node": 2}, ["--gres=gpu:2"], {"host1": 2, "host2": 2}),
    ],
)
def test_step_gets_device_per_slot(
    cluster: SlurmCluster,
    job: list[int],
    num_slots: int,
    settings: dict[str, object],
    options: list[str],
    counts: dict[str, int],
) -> None:
    lines = request_lines(settings, options, num_slots, wants_devices=True, where="exp.yaml")
    job.append(_begin(cluster, [*lines, *options]))
    transport = SrunTransport(job[0], cluster.env, devices=counts)
    for host, count in counts.items():
        said = cluster.run(*_step(cluster, transport, host), _SHOW).stdout
        assert f"{host} has {','.join(map(str, range(count)))}\n" in said


def test_concurrent_steps_get_same_devices(cluster: SlurmCluster, job: list[int]) -> None:
    job.append(_begin(cluster, request_lines({}, [], 4, wants_devices=True, where="exp.yaml")))
    transport = SrunTransport(job[0], cluster.env, devices={"host1": 2})
    # As if an agent restarts while programs of its predecessor still run.
    first = cluster.popen([*_step(cluster, transport, "host1"), f"{_SHOW}; read line"])
    second = cluster.run(*_step(cluster, transport, "host1"), _SHOW).stdout
    assert "host1 has 0,1\n" in second
    output, _ = first.communicate(timeout=60)
    assert "host1 has 0,1\n" in output
