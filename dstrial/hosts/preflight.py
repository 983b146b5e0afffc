"""Check before a start that hosts can train together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from dstrial.errors import HostError, HostProblem
from dstrial.hosts import remote
from dstrial.hosts.connection import HostConnection
from dstrial.hosts.hostfile import Host
from dstrial.hosts.transport import SshTransport, Transport
from dstrial.ranks.identity import SHARE_VARIABLE, may_share

_CONNECT_MARGIN_S = 1.0  # added to the transport's own timeout of a start, whose error message says more
_ANSWER_S = 5.0  # timeout of a host's answer to a request
_CONNECT_S = 2.0  # timeout of a TCP connection between two hosts

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """A host's own report: versions, devices and addresses."""

    python: str
    versions: Mapping[str, str | None]  # of torch, deepspeed and dstrial; None if not installed
    num_accelerators: int  # as counted by the drivers
    addresses: tuple[tuple[str, str], ...]  # interfaces and IPv4 addresses; first the one that ssh used
    environment: Mapping[str, str]  # variables of programs that ssh starts there


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyHost:
    """A host that can train together with the other hosts, and its network address."""

    host: Host
    facts: Facts
    address: str  # IPv4 address for the other hosts, on ``interface``
    interface: str


def check_hosts(
    hosts: Sequence[Host],
    *,
    python: str,
    shared_directory: Path,
    environ: Mapping[str, str] = os.environ,
    transport: Transport | None = None,
) -> list[ReadyHost]:
    """Check that hosts can train together; return hosts with their addresses.

    Args:
        hosts: the hosts, at least one.
        python: path of the interpreter on each host.
        shared_directory: directory of checkpoints, which all hosts must mount; created by the first host.
        environ: environment of the training; ``GLOO_SOCKET_IFNAME`` names the network interface.
        transport: starts programs on the hosts; None for ssh.

    Raises:
        HostError: lists all problems of all hosts.
    """
    transport = transport or SshTransport()
    give_up_at_s = time.monotonic() + transport.connect_s + _CONNECT_MARGIN_S
    connections: list[HostConnection] = []
    try:
        connections += _map_concurrently(hosts, lambda host: HostConnection(host, python, transport))
        answers = _map_concurrently(connections, lambda one: _facts(one, give_up_at_s))
        problems = [answer for answer in answers if isinstance(answer, HostProblem)]
        facts = [answer for answer in answers if isinstance(answer, Facts)]
        known = [one for one, answer in zip(connections, answers, strict=True) if isinstance(answer, Facts)]
        named = named_interface(environ)
        problems += fact_problems(
            [one.host for one in known], facts, own_versions(), environ=environ, interface=named
        )
        places = [address_of(fact, named) for fact in facts]
        problems += _connectivity(known, places)
        problems += _shared_problems(known, shared_directory)
    finally:
        _map_concurrently(connections, HostConnection.close)
    if problems:
        order = [host.name for host in hosts]
        raise HostError(sorted(problems, key=lambda problem: order.index(problem.host)), len(hosts))
    return [ReadyHost(host, fact, *place) for host, fact, place in zip(hosts, facts, places, strict=True)]


def _facts(connection: HostConnection, give_up_at_s: float) -> Facts | HostProblem:
    with contextlib.suppress(TimeoutError):
        answer = connection.next(max(give_up_at_s - time.monotonic(), 0.1))
        if answer is not None:
            return facts_of(answer)
    problem = connection.start_problem()
    connection.abandon()
    return problem


def facts_of(answer: Mapping[str, Any]) -> Facts:
    """Convert a host's first message, the result of ``remote.facts``, to ``Facts``."""
    first = [address for address in answer["reached_at"] if not address.startswith("127.")]
    pairs = [(str(name), str(address)) for name, address in answer["addresses"]]
    return Facts(
        python=str(answer["python"]),
        versions=dict(answer["versions"]),
        num_accelerators=int(answer["num_accelerators"]),
        addresses=tuple(sorted(pairs, key=lambda pair: pair[1] not in first)),
        environment=dict(answer["environment"]),
    )


def named_interface(environ: Mapping[str, str]) -> str | None:
    """Return the network interface that ``GLOO_SOCKET_IFNAME`` names.

    None if the variable is unset or names several interfaces.
    """
    named = environ.get("GLOO_SOCKET_IFNAME", "")
    return named if named and "," not in named else None


def address_of(facts: Facts, interface: str | None) -> tuple[str, str]:
    """Return the (IPv4 address, interface) at which other hosts can connect to a host.

    This is the host's address on ``interface``, else the host's first address. Both are "" if the host has no address.
    """
    pairs = [pair for pair in facts.addresses if pair[0] == interface] or facts.addresses
    name, address = next(iter(pairs), ("", ""))
    return address, name


def own_versions() -> dict[str, str | None]:
    return {name: remote.version_of(name) for name in remote.PACKAGES}


def fact_problems(
    hosts: Sequence[Host],
    facts: Sequence[Facts],
    here: Mapping[str, str | None],
    *,
    environ: Mapping[str, str],
    interface: str | None,
) -> list[HostProblem]:
    """Return problems with the hosts' versions, devices and network interfaces.

    Args:
        hosts: the checked hosts.
        facts: the report of each host.
        here: package -> version on this machine, which all hosts must have; None for a package that is not compared.
        environ: environment of the training, which may disable accelerators or let ranks share one.
        interface: network interface that all hosts must have; None for any.
    """
    problems = []
    has_devices = environ.get("DS_ACCELERATOR") != "cpu" and any(fact.num_accelerators for fact in facts)
    for host, fact in zip(hosts, facts, strict=True):
        found = [*_package_problems(fact, here)]
        if has_devices:
            found += _device_problems(host, fact, environ)
        found += _network_problems(fact, interface, is_alone=len(hosts) == 1)
        problems += [HostProblem(host.name, got, fix) for got, fix in found]
    return problems


def _package_problems(fact: Facts, here: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    own_python = ".".join(platform.python_version_tuple()[:2])
    if fact.python.split(".")[:2] != own_python.split("."):
        yield (f"Python {fact.python}; {own_python} here", "Install the same environment on all hosts.")
    for package, version in here.items():
        found = fact.versions.get(package)
        if version is not None and found != version:
            shown = "without" if found is None else f"{found} of"
            yield (f"{shown} {package}; {version} here", f"Install {package}=={version} there.")


def _device_problems(host: Host, fact: Facts, environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    present = fact.num_accelerators
    missing = [str(slot) for slot in host.slots if slot >= present]
    if not present:
        yield (
            "without an accelerator, and other hosts have some",
            "Leave the host out, or set DS_ACCELERATOR=cpu to train on CPUs.",
        )
    elif missing and not may_share(environ):
        yield (
            f"asked for slot(s) {', '.join(missing)}, and has {present} accelerator(s)",
            f"Write slots={present} for it, or set {SHARE_VARIABLE}=1 to let ranks share a device.",
        )


def _network_problems(fact: Facts, interface: str | None, *, is_alone: bool) -> Iterator[tuple[str, str]]:
    if interface is not None and interface not in [name for name, _ in fact.addresses]:
        shown = ", ".join(f"{name} {address}" for name, address in fact.addresses) or "none"
        yield (
            f"without an IPv4 address on interface {interface} (it has {shown})",
            "Name another by GLOO_SOCKET_IFNAME.",
        )
    elif not fact.addresses and not is_alone:
        yield ("without an IPv4 address but loopback", "Connect it to the others' network.")


def _connectivity(
    connections: Sequence[HostConnection], places: Sequence[tuple[str, str]]
) -> list[HostProblem]:
    """Make each host connect to each other host; return a problem per failure.

    ``places`` has the (IPv4 address, interface) of each host.
    """

    def listen(number: int) -> int | None:
        answer = connections[number].ask({"do": "listen", "address": places[number][0]}, _ANSWER_S)
        return None if answer is None else answer["port"]

    numbers = range(len(connections))
    ports = _map_concurrently(numbers, listen)

    def connect(number: int) -> list[str | None]:
        targets = [[address, port] for (address, _), port in zip(places, ports, strict=True)]
        message = {"do": "connect", "targets": targets, "timeout_s": _CONNECT_S}
        answer = connections[number].ask(message, _ANSWER_S)
        silent = f"no answer from {connections[number].host.name}"
        return [silent] * len(targets) if answer is None else answer["verdicts"]

    verdicts = _map_concurrently(numbers, connect)
    return [
        HostProblem(
            connections[number].host.name,
            f"unable to connect to {connections[other].host.name} ({places[other][0]} {verdicts[number][other]})",
            "Open TCP ports between the hosts in their firewalls, or name another network by GLOO_SOCKET_IFNAME.",
        )
        for other in numbers
        for number in numbers
        if number != other and places[other][0] and verdicts[number][other] is not None
    ]


def _shared_problems(connections: Sequence[HostConnection], directory: Path) -> list[HostProblem]:
    """Return a problem for each host that does not see the first host's directory.

    The first host writes a file into ``directory``, and the other hosts read the file.
    """
    if not connections:
        return []
    first, *others = connections
    probe = {"do": "write_probe", "directory": str(directory)}
    written = first.ask(probe, _ANSWER_S) or {"error": "no answer"}
    if "error" in written:
        problem = HostProblem(
            first.host.name,
            f"unable to write into {directory} ({written['error']})",
            "Name a directory that all hosts can write into by DSTRIAL_RUNS_DIR or --runs-dir.",
        )
        return [problem]
    try:
        answers = _map_concurrently(
            others,
            lambda one: one.ask({"do": "read_probe", "path": written["path"]}, _ANSWER_S) or {},
        )
    finally:
        first.ask({"do": "remove_probe", "path": written["path"], "made": written["made"]}, _ANSWER_S)
    return [
        HostProblem(
            one.host.name,
            f"another {directory} than on {first.host.name} ({answer.get('error', 'other content')})",
            "Checkpoints of several hosts go into one directory: put it on a file system that all hosts mount, and name it by "
            "DSTRIAL_RUNS_DIR or --runs-dir.",
        )
        for one, answer in zip(others, answers, strict=True)
        if answer.get("word") != written["word"]
    ]


def _map_concurrently(items: Sequence[_Item], do: Callable[[_Item], _Result]) -> list[_Result]:
    if not items:
        return []
    with ThreadPoolExecutor(max_workers=len(items)) as threads:
        return list(threads.map(do, items))
