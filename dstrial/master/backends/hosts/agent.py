"""The agent: a process on a host that runs allocations for a remote master.

The agent exchanges lines of JSON with the master's :mod:`~dstrial.master.backends.hosts.link`. Each allocation has its own
supervisor, which outlives the agent and kills the allocation when the *lease* ends. Each heartbeat that the master acknowledges
extends the lease to ``LEASE_S`` after the heartbeat was sent; so the master knows when the lease ends. If the master announces
its shutdown, allocations continue for ``ORPHAN_S``, and the next master fetches their output and exit codes. If the connection
ends without this announcement, the lease is not changed, as the network may have failed.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dstrial.errors import DstrialError, MasterError
from dstrial.file_writes import remove_tree, replace_file
from dstrial.harness_paths import ENDING_NAME
from dstrial.hosts.remote import PREFIX, addresses
from dstrial.hosts.transport import BEAT_S, LEASE_S, ORPHAN_S
from dstrial.master.backends import local, supervisor, task_venv
from dstrial.master.backends.backend import AllocationRequest, SupervisorHandle
from dstrial.master.backends.devices import Slot, find_slots
from dstrial.master.backends.environment import choose_ports
from dstrial.master.backends.fork_servers import ForkServers
from dstrial.master.backends.hosts.streams import Streams, account_of
from dstrial.master.backends.log_file import LOG_NAME
from dstrial.master.state_directory import StateDirectory
from dstrial.master.trial_files import open_regular, read_json

MIRRORED = ("starting.json", "stalled.json")  # files of an allocation's directory that are sent to the master
_POLL_S = 0.1  # interval of checks for new output and exits
_CHUNK_BYTES = 256 * 1024  # maximum output in one message
_KEEP_TRACEBACKS_S = 30 * 86_400.0  # time after a trial's last traceback at which its tracebacks are deleted
_BACKLOG = 128  # limit of trials' connections that are not accepted yet
_COLLECT_PERIOD_S = 3600.0  # interval of deletions of unused environments
_output = threading.Lock()


@dataclasses.dataclass(slots=True)
class _Run:
    directory: Path  # of the allocation, on this host
    handle: SupervisorHandle | None  # of the allocation's supervisor; None if none runs
    sent: int | None = None  # number of bytes sent of the log; None until the master requests the log
    mirrored: dict[str, str] = dataclasses.field(default_factory=dict)  # last sent content of ``MIRRORED``
    is_reported: bool = False  # whether the allocation's exit was sent


def _send(message: Mapping[str, Any]) -> None:
    """Send a line of JSON to the master. Thread-safe; blocks while stdout is full."""
    data = (PREFIX + json.dumps(message) + "\n").encode()
    with _output, contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def _in_background(run: Callable[..., object], *arguments: object, **options: object) -> None:
    threading.Thread(target=run, args=arguments, kwargs=options, name="dstrial-agent", daemon=True).start()


class Agent:
    """Runs a master's allocations on this host.

    ``hello`` is the master's first message, which contains the settings of the agent.
    """

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self._hello = hello
        self._name = str(hello["host"])
        self._directory = StateDirectory.choose().path / "hosts" / str(hello["cluster_id"]) / self._name
        # A node of Slurm or Ray has an agent per job, each with its own files.
        self._suffix = f"-{job_id}" if (job_id := str(hello.get("job_id", ""))) else ""
        self._allocations = self._directory / f"allocations{self._suffix}"
        self._allocations.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._runs: dict[str, _Run] = {}
        self._lease = self._directory / f"lease{self._suffix}"
        self._record = self._directory / f"agent{self._suffix}.json"
        # Replace a missing or expired lease, or that of an earlier boot.
        if not 0 <= supervisor.lease_left_s(str(self._lease)) <= ORPHAN_S:
            self._lease.touch()
            self._set_lease(0.0)
        self._answered_beat: float | None = None
        self._lease_ends_s = _boottime() + LEASE_S  # a fallback: supervisors kill their allocations earlier
        # Pid of Ray's actor, which does not end its children when it ends with the job; None with other transports.
        self._parent = os.getppid() if hello["ends_with_parent"] else None
        self._replace_predecessor()
        self._slots = _slots_of(hello["slots"])
        if self._suffix and len(self._slots) < len(hello["slots"]):
            raise MasterError(
                f"without its devices: the job has {len(hello['slots'])} there, and its programs see {len(self._slots)} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}). Ask for a device for each slot"
            )
        self._fork_servers = ForkServers(
            self._directory / f"fork-server{self._suffix}.log",
            is_on=hello["is_warm"],
            idle_timeout_s=hello["warm_idle_timeout_s"],
        )
        self._streams = Streams(_send)
        self._listener = self._listen()
        self._payload = bytearray()
        # Start at random: the master may still be closing streams of an earlier agent.
        self._num_streams = secrets.randbits(40)
        self._recover_runs(set(hello["live"]))
        _remove_old(self._directory / "tracebacks")

    def begin(self) -> None:
        with self._lock:
            runs = {name: _handle_json(run.handle) for name, run in self._runs.items()}
        slots = [dataclasses.asdict(slot) for slot in self._slots]
        _send({**self._heartbeat(), "hello": runs, "slots": slots, "ports": _ports()})
        for run in (self._send_heartbeats, self._watch_lease, self._poll_runs, self._accept):
            _in_background(run)

    def _replace_predecessor(self) -> None:
        """Write this agent's pid file; kill an earlier connection's agent if it runs."""
        last: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            last = json.loads(self._record.read_text(encoding="utf-8"))
        own = {"pid": os.getpid(), "start_time": supervisor.start_time(os.getpid())}
        replace_file(self._record, json.dumps(own), is_private=True)
        if last and supervisor.start_time(int(last["pid"])) == last["start_time"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(last["pid"]), signal.SIGKILL)

    def _recover_runs(self, live: set[str]) -> None:
        for directory in self._allocations.iterdir():
            handle = local.find(directory)
            if directory.name in live:
                self._runs[directory.name] = _Run(directory, handle)
            else:
                local.kill(handle, directory, leaves_record=False)
                local.remove(directory)

    def _listen(self) -> socket.socket:
        """Listen for connections of trials, if possible on the previous agent's port."""
        record = self._directory / f"relay{self._suffix}.json"
        port = 0
        with contextlib.suppress(OSError, ValueError, KeyError):
            port = int(json.loads(record.read_text(encoding="utf-8"))["port"])
        # Retry: an agent that was just killed may still hold the port.
        for port_tried in (*([port] * 20 if port else []), 0):
            try:
                listener = socket.create_server(("127.0.0.1", port_tried), backlog=_BACKLOG)
            except OSError:
                time.sleep(0.1)
                continue
            found = {"port": listener.getsockname()[1]}
            replace_file(record, json.dumps(found), is_private=True)
            return listener
        raise AssertionError("no port is free")

    # Requests of the master

    def handle(self, request: dict[str, Any]) -> None:
        """Handle a request from the master; handle slow requests in new threads."""
        self._renew_lease(request.get("beat"))
        if "stream" in request:
            self._streams.handle(request)
            return
        if "piece" in request:
            self._payload += base64.b64decode(request["piece"])
            return
        what, name = request.get("do"), str(request.get("id"))
        if what == "leave":
            self._release()
        if what == "outlive":
            self._outlive()
        if what == "submit":
            payload, self._payload = bytes(self._payload), bytearray()
            _in_background(self._submit, name, request, payload)
            return
        with self._lock:
            run = self._runs.get(name)
            if what == "forget":
                self._runs.pop(name, None)
        if run is None:
            return
        if what == "follow":
            run.sent = int(request["size"])
        elif what == "stop" and run.handle is not None:
            local.terminate(run.handle)
        elif what == "kill":
            _in_background(
                local.kill, run.handle, run.directory, leaves_record=bool(request["leaves_record"])
            )
        elif what == "forget":
            _in_background(local.remove, run.directory)

    def _release(self) -> NoReturn:
        """Delete this agent's files and exit; called when its Slurm or Ray job has ended."""
        with self._lock:
            self._fork_servers.close()
        with contextlib.suppress(OSError):
            remove_tree(self._allocations, is_forced=True)
        for name in ("agent{}.json", "relay{}.json", "fork-server{}.log", "lease{}"):
            (self._directory / name.format(self._suffix)).unlink(missing_ok=True)
        os._exit(0)

    def _outlive(self) -> NoReturn:
        """Exit because the master shuts down; allocations continue for up to ``ORPHAN_S``."""
        if supervisor.lease_left_s(str(self._lease)) > 0:
            self._set_lease(_boottime() + ORPHAN_S)
        self._record.unlink(missing_ok=True)
        with self._lock:
            self._fork_servers.close()
        # A normal exit would wait for threads.
        os._exit(0)

    def lose_connection(self) -> None:
        """Close trials' connections; at the lease's end, kill the allocations and exit.

        If the master reconnects earlier, the new agent kills this agent.
        """
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._streams.close()
        self._watch_lease()

    def _submit(self, name: str, request: Mapping[str, Any], model_definition: bytes) -> None:
        try:
            plain = AllocationRequest.from_json(request["request"], model_definition)
            port = self._listener.getsockname()[1]
            asked = dataclasses.replace(
                plain,
                directory=self._allocations / name,
                slots=tuple(slot for slot in self._slots if slot.id in request["slots"]),
                master_url=f"http://127.0.0.1:{port}",
                agent_id=self._name,
                variables=_network_variables(plain),
            )
            local.prepare(
                asked,
                is_warm=self._hello["is_warm"],
                forks_with_accelerators=self._hello["forks_with_accelerators"],
                # Supervisors watch the agent, too: Slurm may kill only the agent's step when the job ends.
                watch={"lease": str(self._lease), "agent": str(self._record) if self._suffix else None},
            )
            with self._lock:
                run = self._runs[name] = _Run(asked.directory, None, sent=0)
                run.handle = local.start(asked.directory, self._fork_servers)
        except Exception as error:  # noqa: BLE001  # reported to the master
            if not isinstance(error, (DstrialError, OSError)):
                traceback.print_exc()
            _send({"id": name, "refused": str(error) or type(error).__name__})
            return
        _send({"id": name, **_handle_json(run.handle), "ports": _ports()})

    # Reports to the master

    def _send_heartbeats(self) -> None:
        while True:
            time.sleep(BEAT_S)
            _send(self._heartbeat())

    def _heartbeat(self) -> dict[str, float]:
        return {"beat": _boottime(), "lease_s": supervisor.lease_left_s(str(self._lease))}

    def _renew_lease(self, beat: float | None) -> None:
        if beat is not None and beat != self._answered_beat:
            self._answered_beat = beat
            self._lease_ends_s = beat + LEASE_S
            self._set_lease(self._lease_ends_s)

    def _set_lease(self, ends_s: float) -> None:
        os.utime(self._lease, (ends_s, ends_s))

    def _watch_lease(self) -> None:
        while _boottime() < self._lease_ends_s and self._parent in (None, os.getppid()):
            time.sleep(BEAT_S)
        try:
            # Supervisors do the same at the end of the lease, unless they are stopped (SIGSTOP).
            for run in list(self._runs.values()):
                local.kill(run.handle, run.directory, leaves_record=False)
        finally:
            os._exit(1)

    def _poll_runs(self) -> None:
        collected_s = 0.0
        while True:
            if time.monotonic() > collected_s + _COLLECT_PERIOD_S:
                collected_s = time.monotonic()
                with contextlib.suppress(OSError):
                    task_venv.collect(self._directory / "venvs", task_venv.UNUSED_S)
            with self._lock:
                runs = list(self._runs.items())
                self._fork_servers.poll(is_busy=bool(runs))
            for name, run in runs:
                try:
                    self._report(name, run)
                except Exception:  # noqa: BLE001  # report the other allocations, and retry this one
                    traceback.print_exc()
                    time.sleep(BEAT_S)
            time.sleep(_POLL_S)

    def _report(self, name: str, run: _Run) -> None:
        if run.sent is None or run.is_reported:
            return
        exit_ = local.poll_exit(run.directory, run.handle)
        self._send_log(name, run)
        self._send_mirrored(name, run)
        if exit_ is not None:
            run.is_reported = True
            _send(
                {
                    "id": name,
                    **dataclasses.asdict(exit_),
                    "is_consequence": _is_consequence(run.directory),
                    "begun": local.begun_checkpoints(run.directory),
                }
            )

    def _send_log(self, name: str, run: _Run) -> None:
        assert run.sent is not None
        with (
            contextlib.suppress(FileNotFoundError, ValueError),
            open_regular(run.directory / LOG_NAME) as file,
        ):
            file.seek(run.sent)
            while data := file.read(_CHUNK_BYTES):
                self._send_file(name, LOG_NAME, data, run.sent)
                run.sent += len(data)

    def _send_mirrored(self, name: str, run: _Run) -> None:
        for file in MIRRORED:
            text = ""
            with contextlib.suppress(OSError, ValueError):
                text = json.dumps(read_json(run.directory / file))
            if text != run.mirrored.get(file, ""):
                run.mirrored[file] = text
                self._send_file(name, file, text.encode() or None)

    def _send_file(self, name: str, file: str, data: bytes | None, at: int | None = None) -> None:
        """Send a file of an allocation to the master.

        ``data`` is the whole content, or the bytes from offset ``at`` on. None means that the file is deleted.
        """
        text = None if data is None else base64.b64encode(data).decode()
        _send({"id": name, "file": file, "at": at, "data": text})

    def _accept(self) -> None:
        """Accept connections of this user's trials and forward them to the master."""
        own = os.geteuid()
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                time.sleep(_POLL_S)
                continue
            if account_of(peer, connection.getsockname()) not in (own, 0):
                connection.close()
                continue
            self._num_streams += 1
            _send({"open": self._num_streams})
            self._streams.add(self._num_streams, connection)


def _slots_of(wanted: list[int]) -> tuple[Slot, ...]:
    """Return this host's slots with indices ``wanted``; unknown indices are ignored."""
    found = {slot.id: slot for slot in find_slots()}
    if all(slot.kind == "cpu" for slot in found.values()):
        found = {slot.id: slot for slot in find_slots(max(wanted, default=-1) + 1)}
    return tuple(found[number] for number in wanted if number in found)


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _ports() -> dict[str, int]:
    return choose_ports(())


def _network_variables(request: AllocationRequest) -> dict[str, str]:
    if len(request.addresses) == 1:
        return {}
    own = request.addresses[request.node_rank]
    interface = next((name for name, address in addresses() if address == own), None)
    if interface is None:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _handle_json(handle: SupervisorHandle | None) -> dict[str, Any]:
    return {} if handle is None else {"pid": handle.pid, "start_time": handle.start_time}


def _is_consequence(directory: Path) -> bool:
    """Return whether the launcher recorded that a rank on another host failed first."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return bool(read_json(directory / ENDING_NAME)["is_consequence"])
    return False


def _remove_old(tracebacks: Path) -> None:
    with contextlib.suppress(OSError):
        for path in tracebacks.iterdir():
            if path.stat().st_mtime < time.time() - _KEEP_TRACEBACKS_S:
                remove_tree(path)


def main() -> None:
    os.umask(0o077)
    with io.BufferedReader(io.FileIO(0, "rb", closefd=False)) as lines:
        hello = json.loads(lines.readline().strip() or "{}")
        if "host" not in hello:  # the connection ended before the first message
            sys.exit(1)
        local.trial_umask = hello["umask"]
        try:
            agent = Agent(hello)
        except (DstrialError, OSError) as error:
            _send({"error": str(error)})
            sys.exit(1)
        # Slurm sends it to all processes of a job before it reclaims the nodes; the master learns that from squeue.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        agent.begin()
        for text in lines:
            try:
                request = json.loads(text) if text.strip() else None
            except ValueError:
                continue  # the master was killed in the middle of a line; an ``outlive`` request may follow
            if request is not None:
                agent.handle(request)
    agent.lose_connection()


if __name__ == "__main__":
    main()
