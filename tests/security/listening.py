"""Listening sockets of process trees, read from ``/proc``."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import struct
from collections.abc import Iterable
from pathlib import Path

_TCP_LISTEN = "0A"
_UNIX_ACCEPTS = 0x10000  # linux/net.h, __SO_ACCEPTCON
_OURS = re.compile(
    r"dstrial\.launch|dstrial\.dsat|torch\.distributed\.run|backends/supervisor|rank_main|/bin/sh"
)


@dataclasses.dataclass(frozen=True, order=True)
class Listener:
    """One listening socket of one process."""

    program: str
    pid: int
    kind: str
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        return self.kind == "unix" or ipaddress.ip_address(self.address).is_loopback

    def __str__(self) -> str:
        where = self.address if self.kind == "unix" else f"{self.address}:{self.port}"
        return f"{self.program} {self.kind} {where}"


def tree_around(pid: int) -> set[int]:
    """Return the pids of a rank's job: launcher, supervisor and all descendants."""
    top = pid
    while (parent := _parent(top)) > 1 and _OURS.search(command_of(parent)):
        top = parent
    return {top, *descendants(top)}


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            children.setdefault(_parent(int(path.name)), []).append(int(path.name))
    found: set[int] = set()
    left = [pid]
    while left:
        for child in children.get(left.pop(), []):
            found.add(child)
            left.append(child)
    return found


def listeners(pids: Iterable[int]) -> list[Listener]:
    """Return the TCP and UNIX sockets on which these processes listen."""
    sockets = {**_tcp("tcp"), **_tcp("tcp6"), **_unix()}
    found = set()
    for pid in pids:
        try:
            links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        for link in links:
            match = re.fullmatch(r"socket:\[(\d+)\]", link)
            if match and match[1] in sockets:
                kind, address, port = sockets[match[1]]
                found.add(Listener(_program(pid), pid, kind, address, port))
    return sorted(found)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _program(pid: int) -> str:
    words = command_of(pid).split()
    names = [word for word in words if word.startswith(("dstrial", "torch.")) or word.endswith(".py")]
    return names[0] if names else " ".join(words[:1])


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _tcp(name: str) -> dict[str, tuple[str, str, int]]:
    found = {}
    for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _TCP_LISTEN:
            host, _, port = fields[1].partition(":")
            words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
            address = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
            mapped = getattr(address, "ipv4_mapped", None)
            found[fields[9]] = (name, str(mapped or address), int(port, 16))
    return found


def _unix() -> dict[str, tuple[str, str, int]]:
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if int(fields[3], 16) & _UNIX_ACCEPTS:
            found[fields[6]] = ("unix", fields[7] if len(fields) > 7 else "", 0)
    return found
