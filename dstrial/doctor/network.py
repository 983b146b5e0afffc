"""Check loopback, host name, and the interfaces of gloo and NCCL."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence

import psutil  # type: ignore[import-untyped]  # no stubs are installed

from dstrial.doctor.finding import Finding, NoAnswerError, note, ok, problem, within

_RESOLVE_TIMEOUT_S = 3.0
_SLOW_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Network configuration of this machine."""

    hostname: str
    resolved: tuple[str, ...]  # addresses of the host name
    resolve_s: float | None  # None if resolving did not end
    interfaces: Mapping[str, Sequence[str]]  # name -> addresses of the interfaces that are up
    has_loopback: bool  # whether a connection to 127.0.0.1 succeeds
    names_loopback: bool  # whether ``localhost`` is 127.0.0.1


def measure() -> Network:
    hostname = socket.gethostname()
    began_at_s = time.monotonic()
    resolve_s: float | None = None
    resolved: tuple[str, ...] = ()
    with contextlib.suppress(NoAnswerError):
        with contextlib.suppress(OSError):
            resolved = within(_RESOLVE_TIMEOUT_S, lambda: _resolve(hostname))
        resolve_s = time.monotonic() - began_at_s
    names_loopback = False
    with contextlib.suppress(NoAnswerError, OSError):
        names_loopback = "127.0.0.1" in within(_RESOLVE_TIMEOUT_S, lambda: _resolve("localhost"))
    states = psutil.net_if_stats()
    interfaces = {
        name: [
            address.address.partition("%")[0]
            for address in addresses
            if address.family in (socket.AF_INET, socket.AF_INET6)
        ]
        for name, addresses in psutil.net_if_addrs().items()
        if name not in states or states[name].isup
    }
    return Network(hostname, resolved, resolve_s, interfaces, _has_loopback(), names_loopback)


def _resolve(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _has_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=1.0):
            return True
    return False


def judge(network: Network, environ: Mapping[str, str]) -> list[Finding]:
    return [
        _judge_loopback(network),
        _judge_hostname(network),
        _judge_gloo(network, environ),
        *_judge_nccl(network, environ),
    ]


def _judge_loopback(network: Network) -> Finding:
    if not network.has_loopback:
        what = "cannot connect to 127.0.0.1: local ranks and the master cannot communicate"
        return problem("loopback", what, "Enable the interface lo (`ip link set lo up`).")
    if not network.names_loopback:
        what = "localhost does not resolve to 127.0.0.1, where the master listens"
        return problem("loopback", what, "Add `127.0.0.1 localhost` to /etc/hosts.")
    return ok("loopback", "127.0.0.1 answers as localhost")


def _judge_hostname(network: Network) -> Finding:
    name = network.hostname
    if network.resolve_s is None:
        what = f"{name} is not resolved within {_RESOLVE_TIMEOUT_S:.0f} s: each start of ranks waits"
    elif not network.resolved:
        what = f"{name} resolves to no address: ranks of several machines cannot connect"
    elif network.resolve_s > _SLOW_S:
        what = f"{name} takes {network.resolve_s:.1f} s to be resolved, at each start of ranks"
    else:
        return ok("hostname", f"{name} is {', '.join(network.resolved)}")
    todo = f"Add this machine's address with `{name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME."
    return note("hostname", what, todo)


def _judge_gloo(network: Network, environ: Mapping[str, str]) -> Finding:
    """Check gloo's interface: ``GLOO_SOCKET_IFNAME``, else that of the host name.

    Source: torch 2.13 ``ProcessGroupGloo.cpp``, ``createDefaultDevice``.
    """
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        unknown = [word for word in chosen.split(",") if word not in network.interfaces]
        if unknown:
            what = f"GLOO_SOCKET_IFNAME={chosen} names {unknown[0]!r}, which is none of {', '.join(network.interfaces)}"
            return problem("gloo interface", what, "Name one that is up, or unset it.")
        return ok("gloo interface", f"{chosen} (GLOO_SOCKET_IFNAME)")
    for address in network.resolved:
        for name, addresses in network.interfaces.items():
            if address in addresses and not address.startswith("127.") and address != "::1":
                return ok("gloo interface", f"{name} ({address}), the address of the machine's name")
    what = "the loopback: ranks of this machine only; for several, set GLOO_SOCKET_IFNAME"
    return ok("gloo interface", what)


def _judge_nccl(network: Network, environ: Mapping[str, str]) -> list[Finding]:
    """Check ``NCCL_SOCKET_IFNAME``: prefixes, ``^`` to exclude, ``=`` for exact names."""
    chosen = environ.get("NCCL_SOCKET_IFNAME")
    if not chosen:
        return []
    is_excluding, words = chosen.startswith("^"), chosen.removeprefix("^")
    is_exact = words.startswith("=")
    wanted = [word for word in words.removeprefix("=").split(",") if word]
    found = [
        name
        for name, addresses in network.interfaces.items()
        if addresses
        and any(name == word if is_exact else name.startswith(word) for word in wanted) is not is_excluding
    ]
    if found:
        return [ok("NCCL interface", f"{', '.join(found)} (NCCL_SOCKET_IFNAME={chosen})")]
    what = f"NCCL_SOCKET_IFNAME={chosen} leaves none of {', '.join(network.interfaces)}"
    return [problem("NCCL interface", what, "Name one that is up, or unset it.")]
