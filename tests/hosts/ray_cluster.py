"""A Ray cluster of simulated machines: a head node and workers, two CPUs each.

Ray declares a disconnected node dead after some seconds. A head takes 30 s and 600 MB, so each test module has one cluster.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Machine, Machines
from machines import missing as missing_machines
from waiting import wait_for

_PORT = 6379
_READY_S = 240.0
_MAIN = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_RAY = (*_MAIN, "start", "--disable-usage-stats")
# Detect dead nodes within 3 s instead of 30 s; send no usage statistics.
_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "0",
}


def missing() -> str:
    """Return the missing requirements; "" if there are none."""
    found = importlib.util.find_spec("ray")
    return "[ray]" if found is None or found.origin is None else missing_machines()


class RayCluster:
    """A Ray cluster whose head is the first machine.

    Attributes:
        address: address of the head for ``ray.init``.
        env: environment of commands on the machines.
    """

    def __init__(self, machines: Machines, cpus: int) -> None:
        self.machines = machines
        self._cpus = cpus
        self.address = f"{machines[1].address}:{_PORT}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env = {**inherited, **_ENVIRON}
        self._start(machines[1])
        begun = [self.begin_node(machine) for machine in machines.all[1:]]
        for one in begun:
            output, _ = one.communicate(timeout=_READY_S)
            assert one.returncode == 0, output

    def _words(self, machine: Machine) -> list[str]:
        where = (
            ["--head", f"--port={_PORT}", "--include-dashboard=false"] if machine is self.machines[1] else []
        )
        return [
            *_RAY, *(where or [f"--address={self.address}"]), f"--node-ip-address={machine.address}", f"--num-cpus={self._cpus}",
            "--num-gpus=0", "--object-store-memory=100000000",
        ]  # fmt: skip

    def _start(self, machine: Machine) -> None:
        self._own_files(machine)
        done = machine.run(self._words(machine), cwd="/", env=self.env, timeout=_READY_S)
        assert done.returncode == 0, done.stdout

    @staticmethod
    def _own_files(machine: Machine) -> None:
        # The machines share /tmp, where Ray keeps its session files.
        done = machine.run(["sh", "-c", "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"], cwd="/")
        assert done.returncode == 0, done.stdout

    def begin_node(self, machine: Machine) -> subprocess.Popen[str]:
        """Start Ray on a machine without Ray; the returned process ends when Ray is up."""
        self._own_files(machine)
        return machine.popen(
            self._words(machine),
            cwd="/",
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def begin_again(self, machine: Machine) -> None:
        """Restart Ray on a node declared dead, after its old processes have ended."""
        wait_for(
            lambda: (
                not any(name in line for line in machine.processes().values() for name in ("raylet", "ray::"))
            ),
            machine.processes,
            deadline_s=180.0,
        )
        for pid in machine.processes():
            machine.signal(pid, signal.SIGKILL)  # Ray's log monitor does not end by itself
        one = self.begin_node(machine)
        output, _ = one.communicate(timeout=_READY_S)
        assert one.returncode == 0, output

    def run(self, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command on the head; ``stdout`` includes stderr."""
        return self.machines[1].run(words, env=self.env, timeout=timeout)

    def ask(self, script: str, *arguments: str) -> str:
        """Run a script connected to Ray on the head; return its last line of output."""
        begin = (
            "import ray, sys\n"
            "ray.init(address=sys.argv[1], namespace='dstrial', log_to_driver=False, logging_level='ERROR')\n"
        )
        done = self.run(sys.executable, "-c", begin + script, self.address, *arguments)
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()[-1]

    def alive(self) -> list[str]:
        """Return the addresses of the nodes that Ray reports as alive."""
        return self.ask("print(*[one['NodeManagerAddress'] for one in ray.nodes() if one['Alive']])").split()

    def drain(self, name: str) -> None:
        node_id = self.ask(
            "print([one['NodeID'] for one in ray.nodes() if one['NodeName'] == sys.argv[2] and one['Alive']][0])",
            name,
        )
        done = self.run(
            *_MAIN, "drain-node", f"--address={self.address}", f"--node-id={node_id}", "--reason-message=test",
            "--reason=DRAIN_NODE_REASON_PREEMPTION", "--deadline-remaining-seconds=600",
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def ours_on(machine: Machine) -> list[str]:
    """Return the command lines of dstrial's processes on a machine, without Ray's."""
    found = [line.replace(sys.prefix, "") for line in machine.processes().values()]
    return [line for line in found if any(name in line for name in ("dstrial", "ray::NodeActor"))]


def wait_until_nothing_is_left(cluster: RayCluster) -> None:
    """Wait until no machine of a cluster runs a process of dstrial."""

    def left() -> list[str]:
        return [line for machine in cluster.machines.all for line in ours_on(machine)]

    wait_for(lambda: not left(), left)


@contextlib.contextmanager
def ray_cluster(num: int, cpus: int) -> Iterator[RayCluster]:
    """Yield a cluster of ``num`` nodes; skip the test if requirements are missing."""
    lacking = missing()
    if lacking:
        pytest.skip(f"Requires: {lacking}")
    with tempfile.TemporaryDirectory(prefix="dr-", dir="/tmp") as root:
        machines = Machines(num, Path(root, "machines"))
        try:
            yield RayCluster(machines, cpus)
        finally:
            machines.close()
