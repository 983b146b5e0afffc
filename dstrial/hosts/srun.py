"""Start programs on the nodes of a Slurm allocation by ``srun``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from dstrial.errors import LaunchError
from dstrial.hosts.hostfile import Host
from dstrial.hosts.transport import Transport, remote_words
from dstrial.slurm.allocation import Allocation, allocation_of, slots_of_nodes

_CONNECT_S = 20.0  # timeout of a step's start and of its first answer
# Slurm's variables that are passed to srun. srun would read the others, which describe the whole job, as its options.
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_DEBUG")

_BY_HAND = "`srun --jobid={job} --overlap -N1 -n1 -w {host} true`"
_SRUN_ERRORS = (
    (("no such file or directory", 127), "without Python at {python}",
     "Put the environment on a file system that all nodes mount, or name another interpreter by --python."),
    (("exec format error",), "another kind of machine than {python} is for", "Ask for nodes of one kind by --constraint."),
    (("invalid job id", "job has already finished", "has been revoked"), "in no allocation any more ({line})",
     "Submit the job once more."),
)  # fmt: skip


class SrunTransport(Transport):
    """Starts programs by ``srun`` in an allocation, each as a step of one task.

    All steps have ``--overlap``, so a step may use all memory, cores and devices that its job has on the node. Exceptions: in a
    job with ``--gpus-per-task``, a step gets only the devices of one task; in a job with ``--gpus``, Slurm rejects the step.
    For such jobs, ``devices`` maps each node to the number of devices that a step requests. For other jobs, ``devices`` is
    empty.
    """

    connect_s = _CONNECT_S
    known_errors = _SRUN_ERRORS
    timeout_error = (
        f"silent (no step began within {_CONNECT_S:g} s)",
        f"Look whether {_BY_HAND} works, and at `scontrol show node {{host}}`.",
    )
    other_error = ("not starting a step", f"Look at what {_BY_HAND} prints.")

    def __init__(
        self,
        job_id: int,
        environ: Mapping[str, str] = os.environ,
        *,
        devices: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.job = str(job_id)
        self._devices = dict(devices)
        self._environ = {
            name: value
            for name, value in environ.items()
            if name in _KEPT or not name.startswith(("SLURM_", "SRUN_", "PMI_", "PMIX_"))
        }

    def words(self, host: str, python: str) -> list[str]:
        options = [
            f"--jobid={self.job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--export=ALL",
            "--unbuffered", "--cpu-bind=none", "--mpi=none", "--chdir=/", "--job-name=dstrial",
        ]  # fmt: skip
        if self._devices.get(host):
            # `--gres` would be one number for all nodes of the job.
            options.append(f"--gpus={self._devices[host]}")
        return ["srun", *options, *remote_words(python)]

    def environment(self) -> Mapping[str, str] | None:
        """Return srun's environment, without variables that srun would read as options."""
        return self._environ


def own_allocation() -> Allocation:
    """Return the Slurm allocation in which this process runs.

    Raises:
        LaunchError: this process is not in an allocation or is one of several tasks of a step; Slurm's variables are invalid.
    """
    found = allocation_of(os.environ)
    if found is None:
        raise LaunchError(
            "--slurm is given, and this is in no allocation (SLURM_JOB_ID is not set); expected one, whose nodes are used. "
            "Start the command by salloc, or in a batch script (sbatch)."
        )
    return found


def transport_of(allocation: Allocation) -> SrunTransport:
    """Return a transport whose programs may use all allocated devices of their nodes."""
    counts = slots_of_nodes(allocation, None) if allocation.divides_devices else ()
    devices = dict(zip(allocation.nodes, counts, strict=True)) if counts else {}
    return SrunTransport(allocation.job_id, devices=devices)


def hosts_of_allocation(allocation: Allocation, wanted: int | None = None) -> tuple[Host, ...]:
    """Return an allocation's nodes as hosts; nodes without a slot are left out.

    ``wanted`` is the total number of slots; None for all slots of the allocation.

    Raises:
        LaunchError: the allocation has fewer than ``wanted`` slots, or the slots cannot be divided equally among the nodes.
    """
    pairs = zip(allocation.nodes, slots_of_nodes(allocation, wanted), strict=True)
    return tuple(Host(name, tuple(range(count))) for name, count in pairs if count)
