"""Runs allocations on a host, for a master on another machine.

The other end of :mod:`~dstrial.master.backends.hosts.link`: requests and answers are lines of JSON. Each allocation has a
supervisor of its own, which outlives this process. When the connection ends because the master has ended, trials go on, and the
next master asks for their output and exit. When nothing is heard for ``LEASE_S`` on an open connection, the cable is cut and
the master restarts the trials elsewhere: then all that runs here is killed.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.errors import DstrialError, MasterError
from dstrial.file_writes import remove_tree, replace_file
from dstrial.harness_paths import ENDING_NAME
from dstrial.hosts.remote import PREFIX, addresses
from dstrial.hosts.transport import BEAT_S, LEASE_S
from dstrial.master.backends import local, supervisor, task_venv
from dstrial.master.backends.backend import SupervisorHandle
from dstrial.master.backends.devices import Slot, find_slots
from dstrial.master.backends.fork_servers import ForkServers, ForkSettings
from dstrial.master.backends.hosts.streams import Streams, account_of
from dstrial.master.backends.log_file import log_paths
from dstrial.master.backends.ports import choose_ports
from dstrial.master.backends.request import AllocationRequest
from dstrial.master.state_directory import StateDirectory
from dstrial.master.trial_files import open_regular, read_json

MIRRORED = ("starting.json", "stalled.json")  # files of an allocation's directory that the master shows
_LOOK_S = 0.1
_CHUNK_BYTES = 256 * 1024
_TRACEBACKS_LAST_S = 30 * 86_400.0
_BACKLOG = 128
_COLLECT_PERIOD_S = 3600.0


@dataclasses.dataclass(slots=True)
class _Run:
    """An allocation here.

    Attributes:
        sent: bytes of each log file that the master has; None before it has asked.
        shown: what the master has of ``MIRRORED``.
        is_told: whether the master knows how it ended.
    """

    directory: Path
    handle: SupervisorHandle | None
    sent: dict[str, int] | None = None
    shown: dict[str, str] = dataclasses.field(default_factory=dict)
    is_told: bool = False


class _Line:
    """Sends the master JSON lines from any thread; blocks while nobody reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, message: Mapping[str, Any]) -> None:
        data = (PREFIX + json.dumps(message) + "\n").encode()
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]


class Agent:
    """Allocations of one master on this host; ``hello`` is the master's first request."""

    def __init__(self, hello: Mapping[str, Any], line: _Line) -> None:
        self._line = line
        self._name = str(hello["host"])
        self._directory = StateDirectory.choose().path / "hosts" / str(hello["cluster_id"]) / self._name
        # A host has several agents where each of its jobs has one.
        self._place = f"-{place}" if (place := str(hello.get("place", ""))) else ""
        self._allocations = self._directory / f"allocations{self._place}"
        self._allocations.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._runs: dict[str, _Run] = {}
        self._guard: int | None = None
        self.heard_s = time.monotonic()
        self._take_over()
        self._slots = _slots_of(hello["slots"])
        if self._place and len(self._slots) < len(hello["slots"]):
            raise MasterError(
                f"without its devices: the job has {len(hello['slots'])} there, and its programs see {len(self._slots)} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}). Ask for a device for each slot"
            )
        self._is_warm = bool(hello["is_warm"])
        self._forks_with_accelerators = bool(hello["forks_with_accelerators"])
        self._fork_servers = ForkServers(
            ForkSettings(is_on=self._is_warm, idle_timeout_s=hello["warm_idle_timeout_s"]),
            self._directory / f"fork-server{self._place}.log",
            None,
        )
        self._streams = Streams(line.say)
        self._listener = self._listen()
        # Not a number of an earlier agent's, which the master may still be closing.
        self._num_streams = secrets.randbits(40)
        self._find_runs(set(hello["live"]))
        _remove_old(self._directory / "tracebacks")

    def begin(self) -> None:
        with self._lock:
            runs = {name: _shown_handle(run.handle) for name, run in self._runs.items()}
        self._line.say(
            {"hello": runs, "slots": [dataclasses.asdict(slot) for slot in self._slots], "ports": _ports()}
        )
        for run in (self._beat, self._watch_lease, self._look, self._accept):
            threading.Thread(target=run, name="dstrial-agent", daemon=True).start()

    def give_back(self) -> None:
        """End helpers that would only start trials; the trials go on."""
        if self._guard is not None:
            with contextlib.suppress(OSError):
                os.write(self._guard, b"x")
        with self._lock:
            self._fork_servers.close()

    def _take_over(self) -> None:
        """Kill the agent of an earlier connection: its lease would end what runs here."""
        record = self._directory / f"agent{self._place}.json"
        with contextlib.suppress(OSError, ValueError, KeyError):
            last = json.loads(record.read_text(encoding="utf-8"))
            # Its guardian first, which would end what runs here.
            for one in (last.get("guardian"), last):
                if one is not None and supervisor.start_time(int(one["pid"])) == one["start_time"]:
                    os.kill(int(one["pid"]), signal.SIGKILL)
        own: dict[str, Any] = _process(os.getpid())
        if self._place:
            own["guardian"] = _process(self._start_guardian())
        replace_file(record, json.dumps(own), is_private=True)

    def _start_guardian(self) -> int:
        """Start a process that kills what runs here if the agent dies; return its pid.

        Slurm kills what it knows of a job's steps when it takes a node away; supervisors are no children of a step.
        """
        read_end, self._guard = os.pipe()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            # Not a child of the step's either, so that it is not killed first.
            pid = os.fork()
            if pid == 0:
                os.close(self._guard)
                self._watch_agent(read_end)
            os.write(tell, str(pid).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(read_end)
        os.close(tell)
        pid = int(os.read(told, 32))
        os.close(told)
        return pid

    def _watch_agent(self, read_end: int) -> None:
        """Wait for the agent's end; unless it has said goodbye, kill all that runs here."""
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        if not os.read(read_end, 1):
            for directory in self._allocations.iterdir():
                local.kill(local.find(directory), directory, leaves_record=False)
        os._exit(0)

    def _find_runs(self, live: set[str]) -> None:
        """Recover what the master knows of, and kill the rest."""
        for directory in self._allocations.iterdir():
            handle = local.find(directory)
            if directory.name in live:
                self._runs[directory.name] = _Run(directory, handle)
            else:
                local.kill(handle, directory, leaves_record=False)
                local.remove(directory)

    def _listen(self) -> socket.socket:
        """Listen on the last agent's port: running trials report to it."""
        record = self._directory / f"relay{self._place}.json"
        port = 0
        with contextlib.suppress(OSError, ValueError, KeyError):
            port = int(json.loads(record.read_text(encoding="utf-8"))["port"])
        # What just has ended may still hold it.
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

    # What the master asks

    def take(self, request: dict[str, Any], data: bytes) -> None:
        """Handle a request; slow ones in a thread of their own."""
        if "stream" in request:
            self._streams.take(request)
            return
        if request.get("do") == "leave":
            self._leave()
            return
        what, name = request.get("do"), str(request.get("id"))
        if what == "submit":
            threading.Thread(target=self._submit, args=(name, request, data), daemon=True).start()
            return
        with self._lock:
            run = self._runs.get(name)
            if what == "forget":
                self._runs.pop(name, None)
        if run is None:
            return
        if what == "follow":
            run.sent = dict(request["sizes"])
        elif what == "stop" and run.handle is not None:
            local.terminate(run.handle)
        elif what == "kill":
            leaves_record = bool(request["leaves_record"])
            threading.Thread(
                target=local.kill,
                args=(run.handle, run.directory),
                kwargs={"leaves_record": leaves_record},
                daemon=True,
            ).start()
        elif what == "forget":
            threading.Thread(target=local.remove, args=(run.directory,), daemon=True).start()

    def _leave(self) -> None:
        """Delete the files of this place: no agent comes back to it."""
        self.give_back()
        with contextlib.suppress(OSError):
            remove_tree(self._allocations, is_forced=True)
        for name in ("agent", "relay"):
            (self._directory / f"{name}{self._place}.json").unlink(missing_ok=True)
        (self._directory / f"fork-server{self._place}.log").unlink(missing_ok=True)
        os._exit(0)

    def be_asked_to_leave(self, *_: Any) -> None:
        """Report a SIGTERM, which Slurm sends some time before it takes the node away."""
        why = "SIGTERM has come, as when it is preempted, cancelled or out of time"
        threading.Thread(target=self._line.say, args=({"leaving": why},), daemon=True).start()

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
            local.prepare(asked, is_warm=self._is_warm, forks_with_accelerators=self._forks_with_accelerators)
            with self._lock:
                run = self._runs[name] = _Run(asked.directory, None, sent={})
                run.handle = local.start(asked.directory, self._fork_servers)
        except Exception as error:  # noqa: BLE001  # whatever it is, the master has to hear of it
            if not isinstance(error, (DstrialError, OSError)):
                traceback.print_exc()
            self._line.say({"refused": name, "text": str(error) or type(error).__name__})
            return
        self._line.say({"started": name, **_shown_handle(run.handle), "ports": _ports()})

    # What is told without being asked

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self._line.say({"beat": True})

    def _watch_lease(self) -> None:
        while time.monotonic() < self.heard_s + LEASE_S:
            time.sleep(BEAT_S)
        self._lose_all()

    def _lose_all(self) -> None:
        """Kill all that runs here and exit: the master has restarted it elsewhere."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            local.kill(run.handle, run.directory, leaves_record=False)
        os._exit(1)

    def _look(self) -> None:
        collected_s = 0.0
        while True:
            if time.monotonic() > collected_s + _COLLECT_PERIOD_S:
                collected_s = time.monotonic()
                with contextlib.suppress(OSError):
                    task_venv.collect(self._directory / "venvs", task_venv.UNUSED_S)
            with self._lock:
                runs = list(self._runs.items())
                self._fork_servers.look(is_busy=bool(runs))
            for name, run in runs:
                try:
                    self._tell(name, run)
                except Exception:  # noqa: BLE001  # the others are told of, and this one again
                    traceback.print_exc()
                    time.sleep(BEAT_S)
            time.sleep(_LOOK_S)

    def _tell(self, name: str, run: _Run) -> None:
        """Send an allocation's new output, then its exit."""
        if run.sent is None or run.is_told:
            return
        exit_ = local.poll_exit(run.directory, run.handle)
        while self._send_output(name, run):
            pass
        self._send_shown(name, run)
        if exit_ is not None:
            run.is_told = True
            self._line.say(
                {
                    "exit": name,
                    "exit_code": exit_.exit_code,
                    "signal": exit_.signal,
                    "time_us": exit_.time_us,
                    "explanation": exit_.explanation,
                    "was_lost": exit_.was_lost,
                    "is_consequence": _is_consequence(run.directory),
                    "begun": local.begun_checkpoints(run.directory),
                }
            )

    def _send_output(self, name: str, run: _Run) -> bool:
        """Send a piece of the log; return whether there may be more."""
        assert run.sent is not None
        parts = [path.name for path in log_paths(run.directory)]
        gone = [part for part in run.sent if part not in parts]
        for part in gone:
            del run.sent[part]
            self._line.say({"log": name, "gone": part})
        for part in parts:
            at = run.sent.get(part, 0)
            try:
                with open_regular(run.directory / part) as file:
                    file.seek(at)
                    data = file.read(_CHUNK_BYTES)
            except (FileNotFoundError, ValueError):
                continue
            if data:
                run.sent[part] = at + len(data)
                text = base64.b64encode(data).decode()
                self._line.say({"log": name, "part": part, "at": at, "data": text})
                return True
        return False

    def _send_shown(self, name: str, run: _Run) -> None:
        for file in MIRRORED:
            text = ""
            with contextlib.suppress(OSError, ValueError):
                text = json.dumps(read_json(run.directory / file))
            if text != run.shown.get(file, ""):
                run.shown[file] = text
                self._line.say({"shown": name, "file": file, "text": text})

    def _accept(self) -> None:
        """Forward connections of this host's trials to the master."""
        own = os.geteuid()
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                time.sleep(_LOOK_S)
                continue
            if account_of(peer, connection.getsockname()) not in (own, 0):
                connection.close()
                continue
            self._num_streams += 1
            self._line.say({"open": self._num_streams})
            self._streams.add(self._num_streams, connection)


def _slots_of(wanted: list[int]) -> tuple[Slot, ...]:
    """Return this host's devices with these numbers; CPU slots without devices."""
    found = {slot.id: slot for slot in find_slots()}
    if all(slot.kind == "cpu" for slot in found.values()):
        found = {slot.id: slot for slot in find_slots(max(wanted, default=-1) + 1)}
    return tuple(found[number] for number in wanted if number in found)


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


def _process(pid: int) -> dict[str, Any]:
    return {"pid": pid, "start_time": supervisor.start_time(pid)}


def _shown_handle(handle: SupervisorHandle | None) -> dict[str, Any]:
    return {} if handle is None else {"pid": handle.pid, "start_time": handle.start_time}


def _is_consequence(directory: Path) -> bool:
    """Return whether the launcher found that a rank elsewhere failed first."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return bool(read_json(directory / ENDING_NAME)["is_consequence"])
    return False


def _remove_old(tracebacks: Path) -> None:
    """Delete tracebacks of trials that have not trained for a month."""
    with contextlib.suppress(OSError):
        for path in tracebacks.iterdir():
            if path.stat().st_mtime < time.time() - _TRACEBACKS_LAST_S:
                remove_tree(path)


def main() -> int:
    os.umask(0o077)
    line = _Line()
    with io.BufferedReader(io.FileIO(0, "rb", closefd=False)) as lines:
        text = lines.readline()
        while text == b"\n":  # the master says that it lives, already
            text = lines.readline()
        if not text:
            return 1
        hello = json.loads(text)
        local.trial_umask = hello["umask"]
        try:
            agent = Agent(hello, line)
        except (DstrialError, OSError) as error:
            line.say({"error": str(error)})
            return 1
        signal.signal(signal.SIGTERM, agent.be_asked_to_leave)
        agent.begin()
        for text in lines:
            agent.heard_s = time.monotonic()
            if text.strip():
                request = json.loads(text)
                agent.take(request, _read(lines, int(request.get("bytes", 0)), agent))
    agent.give_back()
    # Threads that wait for trials would hold up an orderly end; what runs goes on, and the next master asks for it.
    os._exit(0)


def _read(lines: io.BufferedReader[Any], num_bytes: int, agent: Agent) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = lines.read(min(num_bytes - len(data), _CHUNK_BYTES))
        if not piece:
            break
        agent.heard_s = time.monotonic()
        data += piece
    return bytes(data)


if __name__ == "__main__":
    sys.exit(main())
