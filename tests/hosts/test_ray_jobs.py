"""``RayEngine`` on a cluster of three nodes: jobs and programs on their nodes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Machine
from ray_cluster import RayCluster, ray_cluster, wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
HOST1, HOST2, HOST3 = "10.77.0.11", "10.77.0.12", "10.77.0.13"
_SERVER_SCRIPT = Path(__file__).with_name("ray_engine_there.py")
# A program that, like an agent, ends with its parent (the actor) and not when stdin closes.
_AGENT_LIKE = (
    "sh",
    "-c",
    'echo here; p=$PPID; while [ "$(cut -d " " -f 4 /proc/$$/stat)" = $p ]; do sleep 0.2; done',
)
_AGENT_LIKE_START = "sh -c echo here; p="


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(3, gpus=2) as made:
        yield made


class _RefusedError(Exception):
    pass


class Engine:
    """Client of a ``RayEngine`` that runs on the first machine."""

    def __init__(self, cluster: RayCluster, cluster_id: str) -> None:
        self._cluster = cluster
        words = [sys.executable, str(_SERVER_SCRIPT), cluster.address, cluster_id]
        # Slots are CPUs although Ray has logical GPUs.
        self.process = cluster.popen(words, env={"DS_ACCELERATOR": "cpu"})

    def ask(self, what: str, **values: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        said = json.loads(line)
        assert not said["has_ray"]
        if "error" in said:
            raise _RefusedError(said["text"])
        return said["answer"]

    def submit(self, num_slots: int, key: str = "trial-1", **values: Any) -> str:
        job_id: str = self.ask("submit", key=key, title="a title", num_slots=num_slots, **values)
        return job_id

    def job(self, job_id: str) -> dict[str, Any]:
        return next((job for job in self.ask("jobs") if job["id"] == job_id), {"state": "gone", "text": ""})

    def running(self, *arguments: Any, **values: Any) -> tuple[str, list[str]]:
        """Submit a job and wait until it runs; return its id and its nodes."""
        job_id = self.submit(*arguments, **values)
        wait_until(lambda: self.job(job_id)["state"] == "running", lambda: self.job(job_id))
        return job_id, [part["host"] for part in self.job(job_id)["parts"]]

    def program(self, job_id: str, host: str, *words: str) -> subprocess.Popen[bytes]:
        """Start a program on a job's node as the transport does."""
        command = self.ask("words", id=job_id, host=host)
        at = command.index(host) + 1
        return self._cluster.machines[1].popen(
            [*command[:at], *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def close(self) -> None:
        """Cancel all jobs, if the engine still responds, and kill the engine."""
        with contextlib.suppress(OSError, ValueError):
            for job in self.ask("jobs"):
                self.ask("cancel", id=job["id"])
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def engine(cluster: RayCluster) -> Iterator[Engine]:
    made = Engine(cluster, "c1")
    try:
        yield made
    finally:
        made.close()


def _end(program: subprocess.Popen[bytes]) -> tuple[bytes, str, int]:
    out, err = program.communicate(timeout=90)
    return out, err.decode(), program.returncode


def _pids(machine: Machine, start: str) -> list[int]:
    """Return pids of command lines that begin with ``start``, unlike those of relays."""
    return [pid for pid, line in machine.processes().items() if line.startswith(start)]


def _wait_until_clean(machine: Machine) -> None:
    """Wait until a machine runs no node actor and no agent-like program."""

    def left() -> list[str]:
        lines = machine.processes().values()
        return [line for line in lines if "ray::NodeActor" in line or line.startswith(_AGENT_LIKE_START)]

    wait_until(lambda: not left(), left)


def test_ray_program_sees_devices_of_bundle(engine: Engine) -> None:
    show = ("sh", "-c", 'echo "devices $CUDA_VISIBLE_DEVICES"')
    pair, hosts = engine.running(4, wants_devices=True)
    assert len(hosts) == 2
    assert [part["num_slots"] for part in engine.job(pair)["parts"]] == [2, 2]
    for host in hosts:
        assert _end(engine.program(pair, host, *show))[0] == b"devices 0,1\n"
    first, (host,) = engine.running(1, "trial-2", wants_devices=True)
    second, (same,) = engine.running(1, "trial-3", wants_devices=True)
    assert host == same
    seen = {_end(engine.program(job_id, host, *show))[0] for job_id in (first, second)}
    assert seen == {b"devices 0\n", b"devices 1\n"}, "two jobs on a node share no device"


def test_ray_cancel_ends_programs_on_all_nodes(engine: Engine, cluster: RayCluster) -> None:
    job_id, hosts = engine.running(4, excluded_nodes=[HOST1])
    programs = [engine.program(job_id, host, *_AGENT_LIKE) for host in hosts]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == b"here\n"
    engine.ask("cancel", id=job_id)
    engine.ask("cancel", id=job_id)
    for program in programs:
        out, err, code = _end(program)
        assert (out, code) == (b"", 255)
        assert "its placement group was removed" in err
    for machine in cluster.machines.all:
        _wait_until_clean(machine)
    assert engine.ask("jobs") == []
    # A program of the cancelled job cannot start any more.
    _, err, code = _end(engine.program(job_id, hosts[0], "true"))
    assert (code, err) == (255, f"placement group {job_id} is over\n")


def test_ray_killed_bridge_is_restarted(engine: Engine, cluster: RayCluster) -> None:
    job_id, (host,) = engine.running(1)
    bridge = cluster.machines[1].find("-m dstrial.ray.bridge")
    assert bridge is not None
    cluster.machines[1].signal(bridge, signal.SIGKILL)
    answers = []

    def answers_again() -> bool:
        with contextlib.suppress(_RefusedError):
            answers.append(engine.job(job_id))
        return bool(answers)

    wait_until(answers_again)
    assert answers[0]["state"] == "running"
    assert _end(engine.program(job_id, host, "echo", "again")) == (b"again\n", "", 0)
