"""Check Python, the network, this machine's master and environment variables."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

from dstrial import __version__
from dstrial.doctor.finding import Finding, NoAnswerError, note, ok, problem, within
from dstrial.errors import MasterError, install_command
from dstrial.master import daemon
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

_TIMEOUT_S = 3.0  # of a name resolution, and of a request to the master
# Source: DeepSpeed 0.19.8 ``accelerator/real_accelerator.py``, SUPPORTED_ACCELERATOR_LIST.
_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Environment variable that slows training down -> its effect.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked against each other",
    "NCCL_P2P_DISABLE": "devices do not copy to each other directly",
    "NCCL_SHM_DISABLE": "ranks of a machine do not exchange data through memory",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "DSTRIAL_SHARE_DEVICE": "several ranks share a device, over gloo",
}

# ---- Python ----------------------------------------------------------------------------------


def check_python() -> list[Finding]:
    """Return findings on the Python interpreter and on packages that dstrial requires."""
    try:
        asked = importlib.metadata.requires("dstrial") or []
    except importlib.metadata.PackageNotFoundError:
        what = "not compared: dstrial is not installed here"
        packages = [note("packages", what, "`pip install -e .` in the checkout.")]
    else:
        packages = judge_packages(asked, _installed)
    return [_check_interpreter(), ok("dstrial", __version__), *packages]


def _check_interpreter() -> Finding:
    what = f"{platform.python_version()}, {sys.executable}, {platform.system()}"
    if platform.system() != "Linux":
        return problem("python", what, "dstrial needs Linux: it follows processes through /proc.")
    return ok("python", what)


def _installed(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def judge_packages(asked: Sequence[str], installed: Callable[[str], str | None]) -> list[Finding]:
    """Return findings on whether installed packages meet dstrial's requirements.

    ``asked`` are lines of the metadata field ``Requires-Dist``; those of optional extras are ignored. ``installed`` maps the
    name of a package to its version, or to None if the package is missing.
    """
    from packaging.requirements import Requirement

    fitting, findings = [], []
    for one in map(Requirement, asked):
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        version = installed(one.name)
        if version is not None and one.specifier.contains(version, prereleases=True):
            fitting.append(f"{one.name} {version}")
            continue
        what = f"{version or 'missing'}; expected {one.specifier or 'any version'}"
        findings.append(problem(one.name, what, f"`{install_command()}` installs what dstrial needs."))
    return [ok("packages", f"supported: {', '.join(fitting)}"), *findings]


# ---- network and master ----------------------------------------------------------------------


def check_network() -> list[Finding]:
    """Return findings on the loopback interface and on this machine's name."""
    name = socket.gethostname()
    return judge_network(name, _resolved("localhost"), _resolved(name), has_loopback=_has_loopback())


def _resolved(name: str) -> list[str]:
    with contextlib.suppress(NoAnswerError, OSError):
        found = within(_TIMEOUT_S, lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
        return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
    return []


def _has_loopback() -> bool:
    with contextlib.suppress(OSError), socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        with socket.create_connection(server.getsockname(), timeout=1.0):
            return True
    return False


def judge_network(
    name: str, localhost: Sequence[str], addresses: Sequence[str], *, has_loopback: bool
) -> list[Finding]:
    """Return findings on the loopback interface and on this machine's name.

    Args:
        name: this machine's name.
        localhost: addresses of ``localhost``.
        addresses: addresses of ``name``; empty if the name is not resolved.
        has_loopback: whether a connection to 127.0.0.1 succeeds.
    """
    if not has_loopback:
        what = "cannot connect to 127.0.0.1: local ranks and the master cannot communicate"
        loopback = problem("loopback", what, "Enable the interface lo (`ip link set lo up`).")
    elif "127.0.0.1" not in localhost:
        what = "localhost does not resolve to 127.0.0.1, where the master listens"
        loopback = problem("loopback", what, "Add `127.0.0.1 localhost` to /etc/hosts.")
    else:
        loopback = ok("loopback", "127.0.0.1 answers as localhost")
    if addresses:
        return [loopback, ok("hostname", f"{name} is {', '.join(addresses)}")]
    what = f"{name} is not resolved within {_TIMEOUT_S:.0f} s: ranks of several machines cannot connect"
    todo = f"Add this machine's address with `{name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME."
    return [loopback, note("hostname", what, todo)]


def check_master(state: StateDirectory) -> list[Finding]:
    """Return findings on whether this machine's master runs and answers."""
    try:
        record = state.running()
    except MasterError as error:
        return [problem("state directory", str(error), "Name another directory with --state-dir.")]
    if record is None and _is_free(daemon.DEFAULT_PORT):
        return [ok("master", "does not run; `dstrial up` starts it")]
    if record is None:
        what = f"does not run, and another program listens on its port {daemon.DEFAULT_PORT}"
        return [note("master", what, "Start it on another port: `dstrial up --port 0`.")]
    name, restart = f"process {record.pid} at {record.address}", "`dstrial down` and `dstrial up` restart it"
    if (wrong := _wrong_answer(record)) is not None:
        what = f"{name} does not respond correctly: {wrong}"
        return [problem("master", what, f"See `dstrial logs`; {restart}, and trials continue.")]
    found = [ok("master", f"{name} answers; {len(record.slots)} slots")]
    if record.version != __version__:
        what = f"{record.version}; this is dstrial {__version__}"
        found.append(note("master version", what, f"{restart}."))
    return found


def _wrong_answer(record: MasterRecord) -> str | None:
    try:
        info = within(_TIMEOUT_S, lambda: Client(record.address).get("/info"))
    except (NoAnswerError, MasterError) as error:
        return str(error)
    is_own = info.get("cluster_id") == record.cluster_id
    return None if is_own else f"another master answers at {record.address}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((daemon.HOST, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


# ---- environment variables -------------------------------------------------------------------


def judge_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on environment variables that break training or make it slower."""
    found = []
    chosen = environ.get("DS_ACCELERATOR")
    if chosen is not None and chosen not in _ACCELERATORS:
        todo = f"Set it to one of {', '.join(_ACCELERATORS)}, or unset it."
        found.append(problem("DS_ACCELERATOR", f"{chosen!r}, which DeepSpeed does not know", todo))
    ranks = [name for name in _RANK if name in environ]
    if ranks:
        what = "set, as for a rank of a launcher: `python script.py` from this shell waits for other ranks"
        todo = f"`unset {' '.join(ranks)}`, unless a launcher set them."
        found.append(note(", ".join(ranks), what, todo))
    found += [
        note(name, f"{environ[name]}: {why}, which makes training slower", f"`unset {name}`.")
        for name, why in _SLOW.items()
        if environ.get(name) not in (None, "", "0", "OFF", "INFO")
    ]
    found += _judge_proxy(environ)
    return found or [ok("variables", "no variable that prevents or slows training is set")]


def _judge_proxy(environ: Mapping[str, str]) -> list[Finding]:
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    proxy = next((name for name in names if environ.get(name)), None)
    exempt = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    hosts = {word.strip().lstrip(".") for word in exempt}
    if proxy is None or "*" in hosts or {"localhost", "127.0.0.1"} <= hosts:
        return []
    shown = re.sub(r"://[^/@\s]+@", "://…@", environ[proxy])
    what = f"{shown} is asked for the master at localhost too: `det` and trials do not reach it"
    return [problem(proxy, what, "Set `no_proxy=localhost,127.0.0.1`.")]
