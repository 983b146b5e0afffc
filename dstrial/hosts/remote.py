"""First program on a host: report facts, test connections, start another program.

The source is passed to ``python -I -c`` and uses only the standard library, so that it also runs on a host without dstrial.
Each request and each response is a line of JSON; responses begin with ``PREFIX``, because a login shell may print other lines.
The program ends at the end of its input.
"""

# Importing pathlib would add 5 ms to each start. The host may have any Python version.
# ruff: noqa: PTH103, PTH106, PTH108, PTH112, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import socket
import struct
import sys
import time

PREFIX = "dstrial-host "
"""First characters of each response."""
PACKAGES = ("torch", "deepspeed", "dstrial")
"""Packages that must have the same version on all hosts."""
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_BACKLOG = 4096  # maximum number of other hosts that connect to a listening socket
_KFD_NODES = "/sys/class/kfd/kfd/topology/nodes"  # processors that AMD's driver lists; GPUs have SIMD units
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def facts() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "num_accelerators": num_accelerators(),
        "addresses": addresses(),
        "reached_at": os.environ.get("SSH_CONNECTION", "").split(" ")[2:3],
        "environment": dict(os.environ),
    }


def version_of(package: str) -> str | None:
    """Return an installed package's version; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def num_accelerators() -> int:
    """Return the number of GPUs that NVIDIA's or AMD's driver lists on this host."""
    with contextlib.suppress(OSError):
        cards = [name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]
        if cards:
            return len(cards)
    found = 0
    with contextlib.suppress(OSError):
        for node in os.listdir(_KFD_NODES):
            with open(os.path.join(_KFD_NODES, node, "properties"), encoding="ascii") as file:
                found += any(re.fullmatch(r"simd_count [1-9]\d*", line.strip()) for line in file)
    return found


def addresses() -> list[list[str]]:
    """Return ``[interface, IPv4 address]`` pairs, link-local last, without loopback."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                address = socket.inet_ntoa(answer[20:24])
                if not address.startswith("127."):
                    found.append([name, address])
    return sorted(found, key=lambda pair: pair[1].startswith("169.254."))


def listen(address: str, listeners: list[socket.socket]) -> int | None:
    """Listen on a free port; return the port, or None on failure.

    The socket is appended to ``listeners``, which keeps it open until the program ends.
    """
    with contextlib.suppress(OSError):
        # No accept() is needed: the kernel completes one connection of each host by itself.
        listeners.append(socket.create_server((address, 0), backlog=_BACKLOG))
        return int(listeners[-1].getsockname()[1])
    return None


def connect(targets: list[list[Any]], timeout_s: float) -> list[str | None]:
    """Connect to other hosts; return an error text per target, None for a success.

    ``targets`` are ``[address, port]``; the port is None if the host does not listen.
    """
    from concurrent.futures import ThreadPoolExecutor

    def attempt(target: list[Any]) -> str | None:
        address, port = target
        if port is None:
            return "not listening"
        try:
            socket.create_connection((address, port), timeout_s).close()
        except OSError as error:
            return (error.strerror or str(error)).lower()
        return None

    with ThreadPoolExecutor(len(targets)) as threads:
        return list(threads.map(attempt, targets))


def write_probe(directory: str) -> dict[str, Any]:
    """Write a file with a random word into a directory, which is created if needed.

    Return a dict with the file's ``path``, the ``word`` and the list ``made`` of created directories. On failure, return a dict
    with the text ``error``.
    """
    word = secrets.token_hex(16)
    path = os.path.join(directory, f".dstrial-hosts-{word[:12]}")
    made: list[str] = []
    above = directory
    while not os.path.isdir(above) and above != os.path.dirname(above):
        made.append(above)
        above = os.path.dirname(above)
    try:
        os.makedirs(directory, exist_ok=True)
        with open(path, "x", encoding="ascii") as file:
            file.write(word)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return {"error": error.strerror}
    return {"path": path, "word": word, "made": made}


def remove_probe(path: str, made: list[str]) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
        for one in made:
            os.rmdir(one)


def read_probe(path: str) -> dict[str, Any]:
    """Read a file that ``write_probe`` wrote on a shared file system.

    Returns ``{"word": content}``, or ``{"error": message}`` if all retries fail.
    """
    for _ in range(10):
        try:
            with open(path, encoding="ascii") as file:
                return {"word": file.read()}
        except OSError as error:
            problem = error.strerror
            with contextlib.suppress(OSError):
                os.listdir(os.path.dirname(path))  # makes NFS refresh its cache
            time.sleep(0.1)
    return {"error": problem}


def _become(request: dict[str, Any]) -> dict[str, Any]:
    try:
        os.chdir(request["directory"])
        os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606  # no shell is meant
    except OSError as error:
        return {"error": f"{error.filename or request['command'][0]}: {error.strerror}"}
    raise AssertionError("execve has returned")


def main() -> None:
    import site

    with contextlib.suppress(Exception):
        user_site = site.getusersitepackages()
        if os.path.isdir(user_site):  # -I excludes it; the trial's own Python does not
            sys.path.append(user_site)
    listeners: list[socket.socket] = []
    _answer(facts())
    while True:
        line = _read_line()
        if not line.strip():  # `transport.GOODBYE` follows an empty line
            return
        request = json.loads(line)
        what = request.pop("do")
        if what == "listen":
            _answer({"port": listen(request["address"], listeners)})
        elif what == "connect":
            _answer({"verdicts": connect(request["targets"], request["timeout_s"])})
        elif what == "write_probe":
            _answer(write_probe(request["directory"]))
        elif what == "read_probe":
            _answer(read_probe(request["path"]))
        elif what == "remove_probe":
            remove_probe(request["path"], request["made"])
            _answer({})
        elif what == "become":
            _answer(_become(request))


def _answer(answer: dict[str, Any]) -> None:
    data = (PREFIX + json.dumps(answer) + "\n").encode()
    while data:
        data = data[os.write(1, data) :]


def _read_line() -> bytes:
    """Read one line of stdin and no later byte, which may be the next program's input."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
