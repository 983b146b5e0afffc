"""What ranks talk through: interfaces, gloo's and NCCL's choice, the host's name."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from dstrial.doctor.background import NoAnswerError, within
from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.doctor.libraries import TorchBuild

_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1
_RESOLVE_TIMEOUT_S = 3.0
_SLOW_S = 1.0
_CLASS = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclasses.dataclass(frozen=True, slots=True)
class Interface:
    """One network interface.

    Attributes:
        name: as in ``GLOO_SOCKET_IFNAME``.
        addresses: IPv4 and IPv6, without scope.
        is_up: whether it is switched on.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """What this machine knows of its network.

    Attributes:
        resolved: addresses that the name stands for; empty if for none.
        resolve_s: how long that took; None if it did not end.
        interfaces: in the kernel's order.
        infiniband: port -> its state, for example ``mlx5_0/1`` -> ``ACTIVE``.
        has_loopback: whether a connection to 127.0.0.1 can be made.
        names_loopback: whether ``localhost`` stands for it.
    """

    hostname: str
    resolved: tuple[str, ...]
    resolve_s: float | None
    interfaces: tuple[Interface, ...]
    infiniband: Mapping[str, str]
    has_loopback: bool
    names_loopback: bool


def measure() -> Network:
    """Look at interfaces and resolve this machine's name."""
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
    return Network(
        hostname=hostname,
        resolved=resolved,
        resolve_s=resolve_s,
        interfaces=_interfaces(),
        infiniband=_infiniband(),
        has_loopback=_has_loopback(),
        names_loopback=names_loopback,
    )


def _resolve(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def _interfaces() -> tuple[Interface, ...]:
    by_v6 = _ipv6_addresses()
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            v4 = []
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                v4.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
            found.append(Interface(name, (*v4, *by_v6.get(name, ())), _is_up(name)))
    return tuple(found)


def _is_up(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(int((_CLASS / name / "flags").read_text(), 16) & _IFF_UP)
    return True


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _infiniband() -> dict[str, str]:
    found = {}
    with contextlib.suppress(OSError):
        for port in sorted(_INFINIBAND.glob("*/ports/*")):
            state = (port / "state").read_text().strip().rpartition(": ")[2]
            found[f"{port.parent.parent.name}/{port.name}"] = state
    return found


def _has_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=1.0):
            return True
    return False


def gloo_interface(network: Network, environ: Mapping[str, str]) -> str | None:
    """Return the interface that gloo binds; None if it falls back to the loopback.

    ``GLOO_SOCKET_IFNAME``, else the interface that has the address of this machine's name.
    Source: torch 2.13 ``ProcessGroupGloo.cpp``, ``createDefaultDevice``.
    """
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    if chosen:
        return chosen.split(",")[0]
    return next(
        (
            interface.name
            for address in network.resolved
            for interface in network.interfaces
            if address in interface.addresses
        ),
        None,
    )


def nccl_interfaces(network: Network, environ: Mapping[str, str]) -> list[str]:
    """Return the interfaces that NCCL would use, by its rules.

    ``NCCL_SOCKET_IFNAME``: prefixes, ``^`` to leave out, ``=`` for exact names. Without it: those that begin with ``ib``, else
    whatever is neither the loopback nor Docker's, else Docker's, else the loopback.
    Source: NCCL user guide, environment variables.
    """
    usable = [interface.name for interface in network.interfaces if interface.is_up and interface.addresses]
    chosen = environ.get("NCCL_SOCKET_IFNAME")
    if chosen:
        leaves_out, words = chosen.startswith("^"), chosen.removeprefix("^")
        is_exact = words.startswith("=")
        names = [word for word in words.removeprefix("=").split(",") if word]
        return [
            name
            for name in usable
            if any(name == word if is_exact else name.startswith(word) for word in names) is not leaves_out
        ]
    for rule in (
        lambda name: name.startswith("ib"),
        lambda name: not name.startswith(("lo", "docker")),
        lambda name: name.startswith("docker"),
    ):
        if found := [name for name in usable if rule(name)]:
            return found
    return [name for name in usable if name.startswith("lo")]


def judge(network: Network, torch: TorchBuild | None, environ: Mapping[str, str]) -> list[Finding]:
    """Judge what ranks talk through; ``environ`` may choose an interface.

    ``torch`` is the build, which may have NCCL; None if there is none.
    """
    return [
        *_judge_loopback(network),
        _judge_hostname(network),
        *_judge_gloo(network, environ),
        *_judge_nccl(network, torch, environ),
        *_judge_infiniband(network),
    ]


def _judge_loopback(network: Network) -> list[Finding]:
    if not network.has_loopback:
        return [
            problem(
                "loopback",
                "no connection to 127.0.0.1: neither the master nor ranks of one machine reach each other",
                "Switch the interface lo on (`ip link set lo up`).",
            )
        ]
    if not network.names_loopback:
        return [
            problem(
                "loopback",
                "localhost does not stand for 127.0.0.1, where the master listens",
                "Add `127.0.0.1 localhost` to /etc/hosts.",
            )
        ]
    return [ok("loopback", "127.0.0.1 answers as localhost")]


def _judge_hostname(network: Network) -> Finding:
    name = network.hostname
    todo = f"Add this machine's address with `{name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME."
    if network.resolve_s is None:
        return note(
            "hostname",
            f"{name} is not resolved within {_RESOLVE_TIMEOUT_S:.0f} s: each start of ranks waits",
            todo,
        )
    if not network.resolved:
        return note(
            "hostname",
            f"{name} stands for no address: ranks of several machines do not find each other",
            todo,
        )
    if network.resolve_s > _SLOW_S:
        return note(
            "hostname", f"{name} takes {network.resolve_s:.1f} s to be resolved, at each start of ranks", todo
        )
    return ok("hostname", f"{name} is {', '.join(network.resolved)}")


def _judge_gloo(network: Network, environ: Mapping[str, str]) -> list[Finding]:
    chosen = environ.get("GLOO_SOCKET_IFNAME")
    names = {interface.name for interface in network.interfaces}
    if chosen:
        unknown = [word for word in chosen.split(",") if word not in names]
        if unknown:
            return [
                problem(
                    "gloo interface",
                    f"GLOO_SOCKET_IFNAME={chosen} names {unknown[0]!r}, which is none of {', '.join(sorted(names))}",
                    "Name one that is there, or unset it.",
                )
            ]
        return [ok("gloo interface", f"{chosen} (GLOO_SOCKET_IFNAME)")]
    found = gloo_interface(network, environ)
    addresses = [
        address
        for interface in network.interfaces
        if interface.name == found
        for address in interface.addresses
    ]
    if found is None or all(address.startswith("127.") or address == "::1" for address in addresses):
        return [
            ok(
                "gloo interface",
                "the loopback: ranks of this machine only; for several, set GLOO_SOCKET_IFNAME",
            )
        ]
    return [ok("gloo interface", f"{found} ({', '.join(addresses)}), the address of the machine's name")]


def _judge_nccl(network: Network, torch: TorchBuild | None, environ: Mapping[str, str]) -> list[Finding]:
    if torch is None or (torch.cuda is None and torch.hip is None):
        return []
    found = nccl_interfaces(network, environ)
    chosen = environ.get("NCCL_SOCKET_IFNAME")
    if found:
        return [
            ok("NCCL interface", ", ".join(found) + (f" (NCCL_SOCKET_IFNAME={chosen})" if chosen else ""))
        ]
    names = ", ".join(interface.name for interface in network.interfaces)
    return [
        problem(
            "NCCL interface",
            f"NCCL_SOCKET_IFNAME={chosen} leaves none of {names}"
            if chosen
            else "none is up and has an address",
            "Name one that is up, or unset it.",
        )
    ]


def _judge_infiniband(network: Network) -> list[Finding]:
    if not network.infiniband:
        return []
    down = [port for port, state in network.infiniband.items() if state != "ACTIVE"]
    shown = ", ".join(f"{port} {state}" for port, state in network.infiniband.items())
    if len(down) == len(network.infiniband):
        return [
            note(
                "InfiniBand",
                shown,
                "No port is active: look at the cable and at the subnet manager (`ibstat`).",
            )
        ]
    return [ok("InfiniBand", shown)]
