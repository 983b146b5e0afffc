"""Listening sockets and free ports for ranks, and the limit of open files."""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import random
import resource
import socket
from collections.abc import Mapping

from dstrial.errors import RankError
from dstrial.ranks.identity import LOOPBACK_ADDR

_BACKLOG = (
    1024  # limit of connections that are not accepted yet; ranks connect before the server has imported torch
)
# Below Linux's default ephemeral range (32768-60999), so that no outgoing connection takes the port before the listener
# binds it, which may be seconds later, after importing torch.
_PORTS = range(20_000, 29_000)
# The loopback interface of Linux, and that of macOS and the BSDs.
_LOOPBACK_NAMES = ("lo", "lo0")
# gloo listens on the address of the host name, NCCL on the first interface that is not loopback.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_RAISED_FILES = 65_536  # lower than the hard limit (2**30 in containers), as some children close every descriptor in a loop


def raise_file_limit(num_ranks: int) -> None:
    """Raise the soft limit of open files, because each pair of ranks is connected.

    Each gloo group of a rank has a socket per other rank. A no-op for a single rank, or if the limit is high enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = _RAISED_FILES if hard == resource.RLIM_INFINITY else min(_RAISED_FILES, hard)
    if num_ranks > 1 and soft < raised:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


def free_port() -> int:
    """Return a free TCP port on loopback, outside the ephemeral range.

    The choice does not change the state of the trial's random generators.
    """
    start = random.Random().randrange(len(_PORTS))
    for port in itertools.chain(_PORTS[start:], _PORTS[:start]):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK_ADDR, port))
            return port
    raise OSError(f"no port of {_PORTS} is free; expected one. Stop a program that listens there.")


def listening_socket(addr: str, port: int) -> socket.socket:
    """Return a TCP socket that listens on ``addr``, this machine's address or name.

    If ``addr`` is an IP address or ``localhost``, the socket listens only there. For another host name, the socket listens on
    all interfaces, because on this machine the name may resolve to loopback (Debian's ``127.0.1.1``).
    """
    try:
        version = ipaddress.ip_address(LOOPBACK_ADDR if addr == "localhost" else addr).version
    except ValueError:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        addr, version = "", 4
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    # create_server sets SO_REUSEADDR: a port in TIME_WAIT can be bound again.
    return socket.create_server((addr, port), family=family, backlog=_BACKLOG)


def rendezvous_socket(addr: str, port: int) -> socket.socket:
    """Return ``listening_socket(addr, port)`` for a job's rendezvous.

    Raises:
        RankError: another program has taken the port.
    """
    try:
        return listening_socket(addr, port)
    except OSError as error:
        raise RankError(
            f"the rendezvous address {addr}:{port} is in use by another program ({error.strerror}); expected a port that "
            "rank 0 can serve and all ranks can reach. Set MASTER_PORT (and MASTER_ADDR for several machines), the same "
            "for all ranks."
        ) from error


def loopback_only(environ: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that bind gloo and NCCL to loopback.

    Variables that are set in ``environ`` are omitted. Return {} if the machine has no loopback interface.
    """
    present = {name for _, name in socket.if_nameindex()}
    interface = next((name for name in _LOOPBACK_NAMES if name in present), None)
    if interface is None:
        return {}
    return {name: interface for name in _INTERFACE_VARIABLES if name not in environ}
