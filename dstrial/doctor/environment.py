"""Check the network, this machine's master, and environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import re
import socket
import time
from collections.abc import Mapping

from dstrial.doctor.finding import Finding, NoAnswerError, note, ok, problem, within
from dstrial.errors import MasterError
from dstrial.master import daemon
from dstrial.master.client import Client
from dstrial.master.state_directory import MasterRecord, StateDirectory

_RESOLVE_TIMEOUT_S = 3.0
_SLOW_RESOLVE_S = 1.0
_ANSWER_TIMEOUT_S = 3.0
# Source: DeepSpeed 0.19.8 ``accelerator/real_accelerator.py``, SUPPORTED_ACCELERATOR_LIST.
_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa", "klxpu")
_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for",
    "TORCH_DISTRIBUTED_DEBUG": "collectives are checked against each other",
    "NCCL_P2P_DISABLE": "devices do not copy to each other directly",
    "NCCL_SHM_DISABLE": "ranks of a machine do not talk through memory",
    "NCCL_IB_DISABLE": "InfiniBand is not used",
    "DSTRIAL_SHARE_DEVICE": "several ranks share a device, over gloo",
}
_SHOWN = re.compile(
    r"(CUDA_|HIP_|ROCR_|NCCL_|RCCL_|TORCH_|PYTORCH_|GLOO_|DS_|DSTRIAL_|OMP_|SLURM_JOB_ID$|DET_MASTER$"
    r"|PYTHONPATH$|PYTHONOPTIMIZE$|LD_PRELOAD$|LD_LIBRARY_PATH$|CXX$|MAX_JOBS$|TMPDIR$|HF_HOME$)"
)
_LONGEST = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Network:
    """Loopback and name resolution of this machine."""

    hostname: str
    resolved: tuple[str, ...]  # addresses of the host name
    resolve_s: float | None  # None if resolving did not end
    has_loopback: bool  # whether a connection to 127.0.0.1 succeeds
    names_loopback: bool  # whether ``localhost`` is 127.0.0.1


def measure_network() -> Network:
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
    return Network(hostname, resolved, resolve_s, _has_loopback(), names_loopback)


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


def judge_network(network: Network) -> list[Finding]:
    return [_judge_loopback(network), _judge_hostname(network)]


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
    elif network.resolve_s > _SLOW_RESOLVE_S:
        what = f"{name} takes {network.resolve_s:.1f} s to be resolved, at each start of ranks"
    else:
        return ok("hostname", f"{name} is {', '.join(network.resolved)}")
    todo = f"Add this machine's address with `{name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME."
    return note("hostname", what, todo)


@dataclasses.dataclass(frozen=True, slots=True)
class MasterState:
    """Whether this machine's master runs and responds."""

    record: MasterRecord | None  # None if no master runs
    answer: str = ""  # error in the master's response; empty if the response is correct
    error: str = ""  # why the state directory cannot be read
    default_port_is_free: bool = True


def measure_master(state: StateDirectory) -> MasterState:
    try:
        record = state.running()
    except MasterError as error:
        return MasterState(None, error=str(error))
    if record is None:
        return MasterState(None, default_port_is_free=_is_free(daemon.DEFAULT_PORT))
    return MasterState(record, _answer(record))


def _answer(record: MasterRecord) -> str:
    try:
        info = within(_ANSWER_TIMEOUT_S, lambda: Client(record.address).get("/info"))
    except (NoAnswerError, MasterError) as error:
        return str(error)
    is_own = info.get("cluster_id") == record.cluster_id
    return "" if is_own else f"another master answers at {record.address}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((daemon.HOST, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def judge_master(master: MasterState, *, version: str) -> list[Finding]:
    """Return findings on the running master; ``version`` is dstrial's."""
    record = master.record
    if master.error:
        return [problem("state directory", master.error, "Name another directory with --state-dir.")]
    if record is None and master.default_port_is_free:
        return [ok("master", "does not run; `dstrial up` starts it")]
    if record is None:
        what = f"does not run, and another program listens on its port {daemon.DEFAULT_PORT}"
        return [note("master", what, "Start it on another port: `dstrial up --port 0`.")]
    name = f"process {record.pid} at {record.address}"
    if master.answer:
        what = f"{name} does not respond correctly: {master.answer}"
        todo = "See `dstrial logs`; `dstrial down` and `dstrial up` restart it, and trials continue."
        return [problem("master", what, todo)]
    kinds = sorted({str(slot["kind"]) for slot in record.slots})
    found = [ok("master", f"{name} answers; {len(record.slots)} slots ({', '.join(kinds) or 'none'})")]
    if record.version != version:
        anew = "`dstrial down` and `dstrial up` restart it."
        found.append(note("master version", f"{record.version}; this is dstrial {version}", anew))
    return found


def judge_variables(environ: Mapping[str, str]) -> list[Finding]:
    """Return findings on environment variables, without values that may be secret."""
    found = [
        *_judge_accelerator(environ),
        *_judge_ranks(environ),
        *_judge_slow(environ),
        *_judge_proxies(environ),
    ]
    reported = {finding.name for finding in found}
    found += [
        ok(name, _shown(environ[name]))
        for name in sorted(environ)
        if _SHOWN.match(name) and name not in reported and environ[name]
    ]
    return found or [ok("variables", "no variable that changes training is set")]


def _shown(value: str) -> str:
    value = re.sub(r"://[^/@\s]+@", "://…@", value)
    return value if len(value) <= _LONGEST else value[:_LONGEST] + "…"


def _judge_accelerator(environ: Mapping[str, str]) -> list[Finding]:
    name, chosen = "DS_ACCELERATOR", environ.get("DS_ACCELERATOR")
    if chosen is None or chosen in _ACCELERATORS:
        return []
    todo = f"Set it to one of {', '.join(_ACCELERATORS)}, or unset it."
    return [problem(name, f"{chosen!r}, which DeepSpeed does not know", todo)]


def _judge_ranks(environ: Mapping[str, str]) -> list[Finding]:
    there = [name for name in _RANK if name in environ]
    if not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(there):
        return [ok(name, environ[name]) for name in there]
    what = "set, as for a rank of a launcher: `python script.py` from this shell waits for other ranks"
    return [note(", ".join(there), what, f"`unset {' '.join(there)}`, unless a launcher set them.")]


def _judge_slow(environ: Mapping[str, str]) -> list[Finding]:
    return [
        note(name, f"{environ[name]}: {why}, which makes training slower", f"`unset {name}`.")
        for name, why in _SLOW.items()
        if environ.get(name) not in (None, "", "0", "OFF", "INFO")
    ]


def _judge_proxies(environ: Mapping[str, str]) -> list[Finding]:
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    proxy = next((name for name in names if environ.get(name)), None)
    if proxy is None:
        return []
    exempt = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").split(",")
    hosts = {word.strip().lstrip(".") for word in exempt}
    shown = _shown(environ[proxy])
    if "*" in hosts or {"localhost", "127.0.0.1"} <= hosts:
        return [ok(proxy, shown)]
    what = f"{shown} is asked for the master at localhost too: `det` and trials do not reach it"
    return [problem(proxy, what, "Set `no_proxy=localhost,127.0.0.1`.")]
