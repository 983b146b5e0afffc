"""The interface to ssh, Slurm and Ray, which start programs on hosts; and ssh."""

from __future__ import annotations

import base64
import dataclasses
import functools
import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from dstrial.hosts import remote

BEAT_S = 1.0  # between heartbeats of either side
SILENT_S = 5.0  # without a heartbeat: the host is reported
LOST_S = 10.0  # without a heartbeat: the host is lost
LEASE_S = 20.0  # after the last heartbeat that the master has answered: a host kills what it runs
ORPHAN_S = 24 * 3600.0  # after the master has ended: a host kills what it runs
GOODBYE = '{"do": "outlive"}'  # the last line to an agent whose master has ended; a lost connection has none
CONNECT_S = 5
"""How long a host may take to answer ssh, seconds."""
# OpenSSH's client, ssh_config(5): it never asks, shares no connection of the user's own, and forwards nothing.
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
    # A thousand lines of a log wait for no acknowledgement; interactive sessions do.
    "IPQoS": "throughput",
}
# What OpenSSH's client prints, what is wrong then, and what to do; the first one that is found counts.
_SSH_SAYS = (
    (("could not resolve hostname",), "unknown: no such name", "Correct the name, or give {} an entry in ~/.ssh/config."),
    (("remote host identification has changed",), "not the machine that ~/.ssh/known_hosts knows (its host key has changed)",
     "If that is right, remove the old key by `ssh-keygen -R {}`."),
    (("host key verification failed",), "not in ~/.ssh/known_hosts", "Run `ssh {} true` once and accept its key."),
    (("permission denied",), "refusing the login: permission denied",
     "Put your public key there (`ssh-copy-id {0}`), until `ssh {0} true` asks for nothing."),
    (("connection refused",), "refusing ssh's port (connection refused)", "Start sshd on {}, or correct its port."),
    (("timed out", "no route to host", "network is unreachable"), "unreachable ({})",
     "Look whether {} is up and its network is connected."),
)  # fmt: skip
# What belongs to a machine, a login or a terminal, and what tells another job's processes who they are.
STAYING_NAMES = frozenset(
    {
        "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "MAIL", "HOSTNAME", "HOST", "TMPDIR", "TMP", "TEMP",
        "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "STY", "TMUX", "TMUX_PANE", "TERM_SESSION_ID",
        "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
        "RANK", "WORLD_SIZE", "NODE_RANK", "DSTRIAL_SECRET", "DSTRIAL_STORE", "DSTRIAL_HEARTBEAT", "DSTRIAL_LAUNCHED",
    }
)  # fmt: skip
"""Variables that stay, by name."""
STAYING_PREFIXES = (
    "SSH_", "XDG_", "DBUS_", "LOCAL_", "GROUP_", "ROLE_", "CROSS_", "MASTER_", "TORCHELASTIC_", "SLURM_", "PMI_", "PMIX_",
    "OMPI_", "PALS_",
)  # fmt: skip
"""Variables that stay, by how they begin."""
# What Slurm says of the step that starts a program there: one task, which libraries would take for the only rank.
_OF_A_STEP = (
    "SLURM_STEP_", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE", "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_NNODES", "SLURM_STEPMGR", "PMI_", "PMIX_",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a host cannot be used; ``fix`` is one imperative sentence."""

    got: str
    fix: str


class Transport(Protocol):
    """Starts a program on a host, with the input and output of a local command.

    Attributes:
        connect_s: timeout of the start, seconds.
        ends_with_parent: whether the end of the program's parent process means that the host was taken away.
    """

    connect_s: float
    ends_with_parent: bool

    def words(self, host: str, python: str) -> list[str]:
        """Return the command that runs ``remote.main`` by an interpreter there."""
        ...

    def environment(self) -> Mapping[str, str] | None:
        """Return the command's variables; None for those of this process."""
        ...

    def refusal(self, host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
        """Explain why the program has not answered.

        Args:
            host: its name.
            python: path of the interpreter there.
            exit_code: of the command; None while it runs.
            errors: what it has printed.
        """
        ...


@functools.cache
def _packed_source() -> str:
    source = Path(remote.__file__).read_bytes()
    return base64.b64encode(zlib.compress(source, 9)).decode()


def remote_words(python: str) -> list[str]:
    """Return the command that runs ``remote.main`` on a host, which may lack dstrial."""
    program = f"import base64,zlib;exec(zlib.decompress(base64.b64decode({_packed_source()!r})))"
    return [python, "-I", "-u", "-c", program]


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


class SshTransport:
    """Starts programs by ``ssh HOST``, with the user's own configuration."""

    connect_s = float(CONNECT_S)
    ends_with_parent = False

    def words(self, host: str, python: str) -> list[str]:
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", *options, "--", host, remote_command(python)]

    def environment(self) -> Mapping[str, str] | None:
        return None

    def refusal(self, host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
        return refusal_of(host, python, exit_code, errors)


def remote_command(python: str) -> str:
    """Return the command line for a host's login shell."""
    words = " ".join(map(shlex.quote, remote_words(python)))
    # A shell that outlives the program tells its signal by the exit code; sshd alone would tell a closed connection.
    return f"exec sh -c {shlex.quote(f'{words}; exit $?')}"


def refusal_of(host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
    """Explain ssh's failure, by its messages (OpenSSH 8 to 10)."""
    text, by_hand = errors.lower(), f"`ssh {host} true`"
    if exit_code is None:
        got = f"silent (no answer within {CONNECT_S} s)"
        return Refusal(got, f"Look whether {by_hand} works, and how long the login takes.")
    for phrases, got, fix in _SSH_SAYS:
        if any(phrase in text for phrase in phrases):
            return Refusal(got.format(last_line(errors)), fix.format(host))
    if exit_code in (126, 127):
        return Refusal(
            f"without Python at {python}",
            "Install the same environment at the same path on each host, or name another interpreter by --python.",
        )
    return Refusal(
        f"not answering as expected (exit code {exit_code}): {last_line(errors) or 'nothing was printed'}",
        f"Look at what {by_hand} prints.",
    )


def travelling(environ: Mapping[str, str], there: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program on another host.

    All of ``environ`` travels but what is listed above, values with line ends included; ``there``, a login's environment, has
    the rest.
    """
    ours = {name: value for name, value in environ.items() if not stays(name)}
    theirs = {name: value for name, value in there.items() if not name.startswith(("SSH_", *_OF_A_STEP))}
    return {**theirs, **ours}


def stays(name: str) -> bool:
    """Return whether a variable belongs to this machine."""
    return name in STAYING_NAMES or name.startswith(STAYING_PREFIXES)
