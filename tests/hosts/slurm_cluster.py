"""A Slurm cluster of simulated machines, with Debian 12's packages (Slurm 22.05).

Two partitions have all nodes: ``low`` (default) and ``high``, whose jobs preempt those of ``low``: these are requeued after a
grace period of 5 s. A disconnected node is down after 10 s. Needs root, munge, slurmctld, slurmd and Slurm's commands.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from machines import Machine, Machines
from machines import missing as missing_machines
from waiting import wait_for

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
_READY_S = 20.0
_REGISTER_TIMEOUT_S = 90.0
_SBIN = "/usr/sbin:/sbin"
_CONFIG = """
ClusterName=test
SlurmctldHost=host1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again after cred_expire, two minutes by default.
AuthInfo=socket={root}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=10000,batch_sched_delay=0,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
SlurmdTimeout={slurmd_timeout_s}
SlurmctldTimeout=10
InactiveLimit=0
MinJobAge=300
MessageTimeout=10
BatchStartTimeout=10
CompleteWait=0
JobRequeue=1
SlurmdParameters=config_overrides
{gres}NodeName=host[1-{num}] CPUs=2{gpus} Boards=1 SocketsPerBoard=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=4000
PartitionName=low Nodes=host[1-{num}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=high Nodes=host[1-{num}] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_CGROUP_CONFIG = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def missing() -> str:
    """Return the missing requirements; "" if there are none."""
    path = f"{os.environ.get('PATH', '')}:{_SBIN}"
    found = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    return f"[{', '.join(found)}]" if found else missing_machines()


class SlurmCluster:
    """Nodes ``host1``, ``host2``, … with two CPUs each; slurmctld is on ``host1``.

    Attributes:
        env: environment of commands on the machines.
    """

    def __init__(
        self,
        machines: Machines,
        root: Path,
        *,
        grace_s: int = 5,
        gpus: int = 0,
        slurmd_timeout_s: int = 10,
    ) -> None:
        self.machines = machines
        self._root = root
        for name in ("state", "spool", "log", "run", "munge"):
            (root / name).mkdir(parents=True)
        (root / "munge").chmod(0o700)
        key = root / "munge" / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        num = len(machines.all)
        gres = "GresTypes=gpu\n" if gpus else ""
        has = f" Gres=gpu:{gpus}" if gpus else ""
        config = _CONFIG.format(
            root=root,
            num=num,
            grace_s=grace_s,
            gres=gres,
            gpus=has,
            slurmd_timeout_s=slurmd_timeout_s,
        )
        (root / "slurm.conf").write_text(config)
        if gpus:
            self._make_gpus(root, gpus)
        (root / "cgroup.conf").write_text(_CGROUP_CONFIG)
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}",
        }
        files = (f"--{name}-file={root}/munge/{name}" for name in ("pid", "log", "seed"))
        words = ["munged", "--force", f"--key-file={key}", f"--socket={root}/munge/socket", *files]
        subprocess.run(words, env=self.env, check=True, capture_output=True)
        try:
            for machine in machines.all:
                (root / "spool" / machine.name).mkdir()
                # `ip netns exec` remounts /sys; slurmd needs a cgroup directory.
                self._do(machine, "mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup")
                self._do(machine, "mkdir", "/sys/fs/cgroup/systemd")
            self._do(machines[1], "slurmctld", "-c")  # -c: without saved state
            for machine in machines.all:
                self._do(machine, "slurmd", "-N", machine.name)
            self.wait_for_idle(num)
        except BaseException:
            self.close()
            raise

    @property
    def variables(self) -> dict[str, str]:
        """The variables that a master needs to run Slurm's commands."""
        return {name: self.env[name] for name in ("SLURM_CONF", "PATH")}

    @staticmethod
    def _make_gpus(root: Path, num: int) -> None:
        """Create device files that Slurm counts as GPUs."""
        (root / "dev").mkdir()
        for index in range(num):
            os.mknod(root / "dev" / f"gpu{index}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        (root / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={root}/dev/gpu[0-{num - 1}]\n")

    def _do(self, machine: Machine, *words: str) -> None:
        done = machine.run(words, cwd="/", env=self.env)
        assert done.returncode == 0, f"{words}: {done.stdout}"

    def end_controller(self) -> None:
        machine = self.machines[1]
        pid = machine.find("slurmctld")
        assert pid is not None
        machine.signal(pid, signal.SIGKILL)
        wait_for(lambda: machine.find("slurmctld") is None, machine.processes, deadline_s=_READY_S)

    def start_controller(self) -> None:
        self._do(self.machines[1], "slurmctld")

    def heal(self, number: int) -> None:
        """Reconnect a machine, and make its slurmd register at once.

        The controller does not poll nodes that are down. Without SIGHUP, slurmd registers within one to two minutes.
        """
        machine = self.machines[number]
        machine.heal()
        give_up_at_s = time.monotonic() + _REGISTER_TIMEOUT_S
        while (state := self._state_of(machine)).endswith("*") or state in ("down", "unknown", ""):
            assert time.monotonic() < give_up_at_s, self.run("sinfo", "-N").stdout
            pid = machine.find("slurmd -N")
            assert pid is not None, machine.processes()
            machine.signal(pid, signal.SIGHUP)
            ask_again_at_s = time.monotonic() + 5.0
            while time.monotonic() < ask_again_at_s and self._state_of(machine) == state:
                time.sleep(0.2)

    def _state_of(self, machine: Machine) -> str:
        """Return a node's state as in ``sinfo``; ``*`` marks a node that does not respond."""
        return self.run("sinfo", "-h", "-N", "-n", machine.name, "-p", "low", "-o", "%T").stdout.strip()

    def run(
        self, *words: str, timeout: float = 60.0, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first machine; ``stdout`` includes stderr."""
        return self.machines[1].run(words, cwd=cwd, env={**self.env, **(env or {})}, timeout=timeout)

    def popen(
        self, words: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on the first machine; ``stdout`` includes stderr."""
        return self.machines[1].popen(
            words,
            cwd=cwd,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def job(self, job_id: int) -> dict[str, str]:
        said = self.run("scontrol", "show", "job", "-o", str(job_id)).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def wait_for_state(self, job_id: int, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait until a job is in one of the states; return its ``scontrol`` record."""
        wait_for(
            lambda: self.job(job_id).get("JobState") in states,
            lambda: self.job(job_id),
            deadline_s=timeout,
        )
        return self.job(job_id)

    def wait_for_idle(self, num: int, timeout: float = _READY_S) -> None:
        words = ("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D")
        wait_for(
            lambda: self.run(*words).stdout.strip() == str(num),
            lambda: self.run("sinfo").stdout,
            deadline_s=timeout,
        )

    def close(self) -> None:
        """Stop munged; the other daemons end with their machines."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((self._root / "munge" / "pid").read_text()), signal.SIGTERM)


@contextlib.contextmanager
def slurm_cluster(
    num: int, *, grace_s: int = 5, gpus: int = 0, slurmd_timeout_s: int = 10
) -> Iterator[SlurmCluster]:
    """Yield a cluster of ``num`` nodes; skip the test if requirements are missing.

    ``gpus`` is the number of fake GPUs per node: Slurm assigns them to steps, but no device exists.
    A node that does not respond for ``slurmd_timeout_s`` seconds is down.
    """
    lacking = missing()
    if lacking:
        pytest.skip(f"Requires: {lacking}")
    with tempfile.TemporaryDirectory(prefix="ds-", dir="/tmp") as root:
        machines = Machines(num, Path(root, "machines"))
        try:
            cluster = SlurmCluster(
                machines,
                Path(root, "slurm"),
                grace_s=grace_s,
                gpus=gpus,
                slurmd_timeout_s=slurmd_timeout_s,
            )
            try:
                yield cluster
            finally:
                cluster.close()
        finally:
            machines.close()
