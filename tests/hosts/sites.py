"""Sites that run a master's trials: hosts, Slurm jobs, a Slurm allocation, Ray."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from machines import Machines, machines
from master_on_hosts import MasterOnHosts, left_on, wait_until
from ray_cluster import RayCluster, ours_on, ray_cluster
from slurm_cluster import SlurmCluster, slurm_cluster

_IDLE = ("fork_server", "sh -c")  # parts of command lines of processes that may stay on a host
_GROUPS = "print([one['name'] for one in ray.util.placement_group_table().values() if one['state'] != 'REMOVED'] or '')"


class Hosts:
    """A master on machine 1 and its hosts; base class of the other sites."""

    first = 2  # number of the first machine that has slots
    keeps_trials = True  # whether trials continue while the master is down
    returns_nodes = True  # whether a reconnected node can be used again
    grows_trials = True  # whether a running elastic trial grows when slots become free

    def __init__(self, made: Machines) -> None:
        self.machines = made
        self.cut: set[int] = set()

    def new_master(self, place: Path) -> MasterOnHosts:
        return MasterOnHosts(self.machines, place)

    def node(self, number: int) -> str:
        return self.machines[number].name

    def cut_off(self, number: int) -> None:
        self.cut.add(number)
        self.machines[number].cut()

    def heal(self) -> None:
        """Reconnect all machines; return when the nodes can be used again."""
        for number in self.cut:
            self.machines[number].heal()
        self.cut.clear()

    def jobs(self) -> list[str]:
        """Return the ids of the jobs in the site's queue; empty without a queue."""
        return []

    def left(self) -> object:
        """Return processes and jobs that a stopped master has left; falsy if none."""
        return [
            line
            for host in self.machines.all[1:]
            if host.is_up and int(host.name[4:]) not in self.cut
            for line in left_on(host).values()
            if not any(one in line for one in _IDLE)
        ]

    def close(self, master: MasterOnHosts) -> None:
        """Stop a master, and wait until its processes and jobs are gone."""
        self.heal()
        master.down("--now")
        wait_until(lambda: not self.left(), 60, lambda: str(self.left()))


class Slurm(Hosts):
    """A Slurm cluster with a job for each trial."""

    first = 1
    keeps_trials = False  # Slurm may kill what a step of the master has started (ProctrackType)
    grows_trials = False  # a trial keeps the slots of its job until it gets a new job

    def __init__(self, cluster: SlurmCluster) -> None:
        super().__init__(cluster.machines)
        self.cluster = cluster

    def new_master(self, place: Path) -> MasterOnHosts:
        # Two CPUs per task, so that each node has one slot.
        (place / "master.yaml").write_text("slurm: {sbatch_args: [--cpus-per-task=2]}\n")
        return MasterOnHosts(
            self.machines, place, slurm=self.cluster.variables, flags=("--config-file", "master.yaml")
        )

    def heal(self) -> None:
        for number in self.cut:
            self.cluster.heal(number)
        self.cut.clear()

    def jobs(self) -> list[str]:
        found = self.cluster.run("squeue", "-h", "-o", "%i").stdout.split()
        assert found, "there is no job"
        return sorted(found)

    def left(self) -> object:
        """Return jobs and processes; a disconnected node's COMPLETING job is ignored."""
        queue = self.cluster.run("squeue", "-h", "-p", "low", "-o", "%i %T").stdout.splitlines()
        jobs = [line for line in queue if not (self.cut and line.endswith("COMPLETING"))]
        lines = [line for one in self.machines.all for line in one.processes().values()]
        return jobs + [line for line in lines if "dstrial" in line]


class Allocation(Slurm):
    """A master in a Slurm allocation of three nodes."""

    returns_nodes = False  # Slurm removes a node that was down from an allocation with --no-kill

    def __init__(self, cluster: SlurmCluster) -> None:
        super().__init__(cluster)
        self._salloc: subprocess.Popen[str] | None = None
        self._job = ""

    def new_master(self, place: Path) -> MasterOnHosts:
        told = place / "allocation"
        hold = f"env -0 > {told}; exec sleep 12345"
        words = ["salloc", "-N3", "--no-kill", "--ntasks-per-node=1", "bash", "-c", hold]
        self._salloc = self.cluster.popen(words, cwd=place)
        wait_until(
            lambda: told.exists() and told.read_bytes().endswith(b"\0"), 30, lambda: "there is no allocation"
        )
        pairs = [pair.split("=", 1) for pair in told.read_text().split("\0") if "=" in pair]
        variables = {name: value for name, value in pairs if name.startswith("SLURM_") or name == "PATH"}
        self._job = variables["SLURM_JOB_ID"]
        return MasterOnHosts(self.machines, place, allocation=variables)

    def close(self, master: MasterOnHosts) -> None:
        self.heal()
        master.down("--now")
        self.cluster.run("scancel", self._job)
        for pid, line in self.machines[1].processes().items():
            if "sleep 12345" in line:
                self.machines[1].signal(pid, signal.SIGKILL)
        assert self._salloc is not None
        self._salloc.communicate(timeout=60)
        self.cluster.wait_for_idle(3, timeout=60)


class Ray(Hosts):
    """A Ray cluster with a placement group for each trial."""

    first = 1
    grows_trials = False

    def __init__(self, cluster: RayCluster) -> None:
        super().__init__(cluster.machines)
        self.cluster = cluster

    def new_master(self, place: Path) -> MasterOnHosts:
        return MasterOnHosts(self.machines, place, has_ray=True)

    def node(self, number: int) -> str:
        return self.machines[number].address

    def heal(self) -> None:
        """Reconnect all nodes, and restart Ray on those that it has declared dead."""
        if self.cut:
            num = len(self.machines.all) - len(self.cut)
            wait_until(lambda: len(self.cluster.alive()) <= num, 60, lambda: str(self.cluster.alive()))
        for number in self.cut:
            self.machines[number].heal()
        self.cut.clear()
        time.sleep(4)  # within this time Ray may still declare a node dead
        alive = self.cluster.alive()
        for host in self.machines.all:
            if host.address not in alive:
                self.cluster.begin_again(host)

    def left(self) -> object:
        return [line for one in self.machines.all for line in ours_on(one)] or self.cluster.ask(_GROUPS)


@contextlib.contextmanager
def _hosts() -> Iterator[Hosts]:
    with machines(4) as made:
        yield Hosts(made)


@contextlib.contextmanager
def _slurm() -> Iterator[Hosts]:
    with slurm_cluster(3) as cluster:
        yield Slurm(cluster)


@contextlib.contextmanager
def _allocation() -> Iterator[Hosts]:
    with slurm_cluster(3) as cluster:
        yield Allocation(cluster)


@contextlib.contextmanager
def _ray() -> Iterator[Hosts]:
    with ray_cluster(3, cpus=1) as cluster:
        yield Ray(cluster)


SITES: dict[str, Callable[[], contextlib.AbstractContextManager[Hosts]]] = {
    "hosts": _hosts, "slurm": _slurm, "allocation": _allocation, "ray": _ray,
}  # fmt: skip
