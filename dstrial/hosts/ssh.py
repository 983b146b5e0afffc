"""Programs on hosts by OpenSSH's client."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from dstrial.hosts.transport import Refusal, last_line, remote_words

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


class SshTransport:
    """Starts programs by ``ssh HOST``, with the user's own configuration."""

    connect_s = float(CONNECT_S)

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
    text = errors.lower()
    by_hand = f"`ssh {host} true`"
    if exit_code is None:
        return Refusal(
            f"silent (no answer within {CONNECT_S} s)",
            f"Look whether {by_hand} works, and how long the login takes.",
        )
    if "could not resolve hostname" in text:
        return Refusal(
            "unknown: no such name", f"Correct the name, or give {host} an entry in ~/.ssh/config."
        )
    if "remote host identification has changed" in text:
        return Refusal(
            "not the machine that ~/.ssh/known_hosts knows (its host key has changed)",
            f"If that is right, remove the old key by `ssh-keygen -R {host}`.",
        )
    if "host key verification failed" in text:
        return Refusal("not in ~/.ssh/known_hosts", f"Run {by_hand} once and accept its key.")
    if "permission denied" in text:
        return Refusal(
            "refusing the login: permission denied",
            f"Put your public key there (`ssh-copy-id {host}`), until {by_hand} asks for nothing.",
        )
    if "connection refused" in text:
        return Refusal(
            "refusing ssh's port (connection refused)", f"Start sshd on {host}, or correct its port."
        )
    if "timed out" in text or "no route to host" in text or "network is unreachable" in text:
        return Refusal(
            f"unreachable ({last_line(errors)})", f"Look whether {host} is up and its network is connected."
        )
    if exit_code in (126, 127):
        return Refusal(
            f"without Python at {python}",
            "Install the same environment at the same path on each host, or name another interpreter by --python.",
        )
    return Refusal(
        f"not answering as expected (exit code {exit_code}): {last_line(errors) or 'nothing was printed'}",
        f"Look at what {by_hand} prints.",
    )
