"""Start programs on hosts: the base class of transports, and the ssh transport."""

from __future__ import annotations

import abc
import base64
import functools
import shlex
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrial.errors import HostProblem
from dstrial.hosts import remote
from dstrial.visible_text import visible_line

BEAT_S = 1.0  # interval of heartbeats, in both directions
SILENT_S = 5.0  # time without a heartbeat after which the master reports a host as silent
LOST_S = 10.0  # time without a heartbeat after which the master treats a host as lost
LEASE_S = 20.0  # time after its last acknowledged heartbeat at which an agent kills its allocations
ORPHAN_S = 24 * 3600.0  # time after a master's goodbye at which an agent kills its allocations
GOODBYE = '{"do": "outlive"}'  # last line to an agent when its master ends, not when the network fails
CONNECT_S = 5
"""Timeout of a host's answer to ssh, seconds."""
# Options of OpenSSH's client, ssh_config(5): no prompts, no shared connection, no forwarding.
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_S),
    "ConnectionAttempts": "1",
    "ControlMaster": "no",
    "ControlPath": "none",
    "ClearAllForwardings": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveInterval": "5",
    "ServerAliveCountMax": "4",
    # Interactive sessions wait for acknowledgements, which delays logs of many lines.
    "IPQoS": "throughput",
}
# Messages of OpenSSH's client (8 to 10).
_SSH_ERRORS = (
    (("could not resolve hostname",), "unknown: no such name", "Correct the name, or give {host} an entry in ~/.ssh/config."),
    (("remote host identification has changed",), "not the machine that ~/.ssh/known_hosts knows (its host key has changed)",
     "If that is right, remove the old key by `ssh-keygen -R {host}`."),
    (("host key verification failed",), "not in ~/.ssh/known_hosts", "Run `ssh {host} true` once and accept its key."),
    (("permission denied",), "refusing the login: permission denied",
     "Put your public key there (`ssh-copy-id {host}`), until `ssh {host} true` asks for nothing."),
    (("connection refused",), "refusing ssh's port (connection refused)", "Start sshd on {host}, or correct its port."),
    (("timed out", "no route to host", "network is unreachable"), "unreachable ({line})",
     "Look whether {host} is up and its network is connected."),
    ((126, 127), "without Python at {python}",
     "Install the same environment at the same path on each host, or name another interpreter by --python."),
)  # fmt: skip
# Variables that describe a machine, a login or a terminal, or that identify this process in its job.
LOCAL_NAMES = frozenset(
    {
        "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "MAIL", "HOSTNAME", "HOST", "TMPDIR", "TMP", "TEMP",
        "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "STY", "TMUX", "TMUX_PANE", "TERM_SESSION_ID",
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
        "RANK", "WORLD_SIZE", "NODE_RANK", "DSTRIAL_SECRET", "DSTRIAL_STORE", "DSTRIAL_HEARTBEAT", "DSTRIAL_LAUNCHED",
    }
)  # fmt: skip
"""Variables that are not sent to other hosts, by name."""
LOCAL_PREFIXES = (
    "SSH_", "XDG_", "DBUS_", "LOCAL_", "GROUP_", "ROLE_", "CROSS_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_",
    "OMPI_", "PALS_",
)  # fmt: skip
"""Prefixes of variables that are not sent to other hosts."""
# Slurm's variables of the step that starts a program. The step has one task, so libraries would assume a job of one rank.
_OF_A_STEP = (
    "SLURM_STEP_", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_NNODES", "SLURM_STEPMGR", "PMI_", "PMIX_",
)  # fmt: skip


class Transport(abc.ABC):
    """Starts a program on a host through a local command: ssh, srun or Ray's relay.

    Attributes:
        connect_s: timeout from the command's start until the program's first line, seconds.
        ends_with_parent: whether the end of the program's parent process means that the Slurm or Ray job has lost the host.
        job: Slurm's or Ray's id of the job, for messages; "" with ssh.
        known_errors: rows (causes, problem, fix), where causes are exit codes or phrases of stderr in lower case. The first row
            with a matching cause is used.
        timeout_error: problem and fix if the command is still running.
        other_error: problem and fix if no row of ``known_errors`` matches.

    The texts "problem" and "fix" may have the fields ``{host}``, ``{python}`` (path of the host's interpreter), ``{job}`` and
    ``{line}`` (last line of stderr).
    """

    connect_s: float
    ends_with_parent = False
    job = ""
    known_errors: Sequence[tuple[Sequence[str | int], str, str]] = ()
    timeout_error: tuple[str, str]
    other_error: tuple[str, str]

    @abc.abstractmethod
    def words(self, host: str, python: str) -> list[str]:
        """Return the local command that runs ``remote.main`` with ``python`` on ``host``."""

    def environment(self) -> Mapping[str, str] | None:
        """Return the local command's environment; None for this process's environment."""
        return None

    def start_problem(self, host: str, python: str, exit_code: int | None, errors: str) -> HostProblem:
        """Return why a program on a host has not answered, and what users can do.

        ``exit_code`` (None while running) and ``errors`` (stderr) are the local command's.
        """
        text, line = errors.lower(), last_line(errors)
        if exit_code is None:
            got, fix = self.timeout_error
        else:
            rows = (
                (got, fix)
                for causes, got, fix in self.known_errors
                if any(one == exit_code if isinstance(one, int) else one in text for one in causes)
            )
            got, fix = next(
                rows, (f"{self.other_error[0]} (exit code {exit_code}): {{line}}", self.other_error[1])
            )
        fields = {"host": host, "python": python, "job": self.job, "line": line or "nothing was printed"}
        return HostProblem(host, visible_line(got.format(**fields)), fix.format(**fields))


@functools.cache
def _packed_source() -> str:
    source = Path(remote.__file__).read_bytes()
    return base64.b64encode(zlib.compress(source, 9)).decode()


def remote_words(python: str) -> list[str]:
    """Return the command that runs ``remote.main`` on a host without dstrial."""
    program = f"import base64,zlib;exec(zlib.decompress(base64.b64decode({_packed_source()!r})))"
    return [python, "-I", "-u", "-c", program]


def last_line(text: str) -> str:
    """Return a text's last line that is not blank; "" if there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


class SshTransport(Transport):
    """Starts programs by ``ssh HOST``, with the user's ssh configuration."""

    connect_s = float(CONNECT_S)
    known_errors = _SSH_ERRORS
    timeout_error = (
        f"silent (no answer within {CONNECT_S} s)",
        "Look whether `ssh {host} true` works, and how long the login takes.",
    )
    other_error = ("not answering as expected", "Look at what `ssh {host} true` prints.")

    def words(self, host: str, python: str) -> list[str]:
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", *options, "--", host, remote_command(python)]


def remote_command(python: str) -> str:
    """Return the shell command, an argument of ssh, that runs ``remote.main``."""
    words = " ".join(map(shlex.quote, remote_words(python)))
    # The outer shell turns a signal that ends the program into an exit code; sshd would only close the connection.
    return f"exec sh -c {shlex.quote(f'{words}; exit $?')}"


def remote_environment(environ: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Merge the environments of this process and another host, for a program there.

    ``environ`` is this process's environment, ``there`` that of ``remote.main`` on the host. Variables of ``environ`` take
    precedence. Variables of ``environ`` that are local (``is_local_variable``) are left out. So are variables of ``there`` that
    describe the ssh session or the Slurm step.
    """
    ours = {name: value for name, value in environ.items() if not is_local_variable(name)}
    theirs = {name: value for name, value in there.items() if not name.startswith(("SSH_", *_OF_A_STEP))}
    return {**theirs, **ours}


def is_local_variable(name: str) -> bool:
    """Return whether a variable is specific to this machine, so not sent to others."""
    return name in LOCAL_NAMES or name.startswith(LOCAL_PREFIXES)
