"""The master's end of the connection to a host's agent.

A thread per host connects, starts the agent (:mod:`~dstrial.master.backends.hosts.agent`) over the connection, and reconnects
after each disconnect. Allocations' output is mirrored into directories on the master's machine. The scheduler's thread never
waits for a host.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.file_writes import replace_file
from dstrial.hosts.connection import HostConnection
from dstrial.hosts.hostfile import Host
from dstrial.hosts.preflight import address_of, fact_problems, facts_of, named_interface, own_versions
from dstrial.hosts.transport import (
    BEAT_S,
    CONNECT_S,
    LEASE_S,
    LOST_S,
    ORPHAN_S,
    SILENT_S,
    SshTransport,
    Transport,
    last_line,
    remote_environment,
)
from dstrial.master.backends.backend import AllocationRequest, Cause, Node, NodeExit, SupervisorHandle
from dstrial.master.backends.devices import Slot
from dstrial.master.backends.hosts.streams import Streams
from dstrial.master.backends.log_file import LOG_NAME
from dstrial.master.clock import now_us
from dstrial.master.store.nodes import slot_id_of
from dstrial.storage_guard import SAVING_DIRECTORY
from dstrial.visible_text import visible_line

logger = logging.getLogger("dstrial.master.hosts")

_AGENT = "dstrial.master.backends.hosts.agent"
_RETRY_S = 1.0  # interval of attempts to connect
_RECONNECT_GRACE_S = 4.0  # time after a disconnect before a host is lost: only its agent may have ended
_HELLO_TIMEOUT_S = 30.0  # timeout of an agent's start, which imports dstrial
_LEAVE_S = 2.0  # timeout for an agent to delete its files
_SILENT_END_S = 2 * BEAT_S  # time without a heartbeat after which the host may be up without a network
_MARGIN_S = 2.0  # delay after a lease's end until its allocations are lost: supervisors poll the lease
_KILLED = 137  # exit code of SIGKILL in a shell
_ORPHAN_NOTICE = (
    "Allocations of the last master may still run there; they restart elsewhere when the host answers, at the latest after "
    f"{ORPHAN_S / 3600:g} hours"
)


@dataclasses.dataclass(frozen=True, slots=True)
class AgentSettings:
    """The master's settings for the agents on its hosts."""

    python: str  # path of the interpreter on every host
    cluster_id: str  # id of the master
    master_port: int  # on the master's loopback address
    umask: int | None  # umask of entrypoints; None for the default on the host
    is_warm: bool  # whether fork servers may start trials
    forks_with_accelerators: bool  # whether fork servers may also start trials on accelerators
    warm_idle_timeout_s: float  # idle time after which a fork server ends
    transport: Transport = dataclasses.field(default_factory=SshTransport)


@dataclasses.dataclass(slots=True)
class RemoteRun:
    """State of an allocation on one host, as the host's agent last reported it."""

    mirror: Path  # local copy of the allocation's directory on the host
    # None once the agent has confirmed the request, or if an earlier master sent it
    request: AllocationRequest | None
    slots: tuple[int, ...]  # indices of the allocation's slots on the host
    ranks: str  # for messages: ``ranks 2 to 3``
    handle: SupervisorHandle | None = None
    exit: NodeExit | None = None
    is_consequence: bool = False  # whether a rank on another host failed first
    time_us: int = 0  # time of the exit, microseconds since the epoch; 0 before
    heard_s: float = 0.0  # time at which the master learned of the exit, monotonic seconds
    is_stopping: bool = False  # whether the entrypoint is asked to stop
    kill: bool | None = None  # ``leaves_record`` of the requested kill; None if none was requested
    is_sent: bool = False  # whether the agent may have received the request
    notes: list[str] = dataclasses.field(default_factory=list)  # new warnings for the allocation's log


class HostLink:
    """The master's connection to the agent on one host, and the host's allocations.

    Args:
        notify: wakes the scheduler; called from any thread.
        slot_ids: cluster-wide ids of ``host.slots``; by default computed from the slots' indices.
        job_id: id of the Slurm or Ray job that the agent serves (one agent per job and node); "" for a host of a hostfile.
    """

    def __init__(
        self,
        node_id: int,
        host: Host,
        settings: AgentSettings,
        notify: Callable[[], None],
        *,
        slot_ids: Sequence[int] | None = None,
        job_id: str = "",
    ) -> None:
        self.node_id = node_id
        self.host = host
        self._settings = settings
        self._notify = notify
        self._job_id = job_id
        ids = [slot_id_of(node_id, number) for number in host.slots] if slot_ids is None else slot_ids
        self._ids = dict(zip(host.slots, ids, strict=True))
        self._is_released = False
        self._lock = threading.RLock()
        self._runs: dict[str, RemoteRun] = {}
        self._connection: HostConnection | None = None
        self._is_up = False  # whether the agent has answered on the connection
        # Latest end of an earlier master's allocations: its ``outlive`` message extends their lease.
        self._lease_ends_s = time.monotonic() + ORPHAN_S + LEASE_S
        self._streams = Streams(self._send)
        self._slots: tuple[Slot, ...] = tuple(
            Slot(self._ids[number], "cpu", "", f"{host.name}-{number}") for number in host.slots
        )
        self._ports: dict[str, int] = {}
        self._address = ""
        self._why_down: str | None = "not connected yet"
        self._since_us = now_us()
        self._down_s = time.monotonic()
        self._was_silent = False
        self._may_be_cut_off = False  # whether the disconnected host may still run
        self._lost_reason: str | None = None  # why the job has lost the host
        self._is_closing = threading.Event()
        self.has_tried = threading.Event()
        """Set after the first attempt to connect, successful or not."""
        self._thread = threading.Thread(target=self._run_loop, name=f"dstrial-link-{host.name}", daemon=True)

    def start(self) -> None:
        if self._thread.ident is None:  # `Backend.begin` is called again if it raised
            self._thread.start()

    def numbers_of(self, slot_ids: Sequence[int]) -> tuple[int, ...]:
        by_id = {slot_id: number for number, slot_id in self._ids.items()}
        return tuple(by_id[slot_id] for slot_id in slot_ids)

    def close(self, *, for_good: bool = False) -> None:
        """Disconnect from the host; allocations there continue.

        With ``for_good``, the host has no allocation and is not used again: the agent deletes its own files there.
        """
        with self._lock:
            connection = self._connection
            is_up = self._is_up
            self._is_released = self._is_released or for_good
        if for_good and is_up and connection is not None:
            self._send({"do": "leave"})
            connection.wait(_LEAVE_S)
        self._is_closing.set()
        if connection is not None:
            if self._is_released:
                connection.abandon()
            connection.close()
        if self._thread.is_alive():
            self._thread.join(CONNECT_S)

    def node(self) -> Node:
        with self._lock:
            return Node(
                self.node_id,
                self.host.name,
                self._address or self.host.name,
                self._slots,
                self._why_down,
                self._since_us,
            )

    # Requests of the scheduler

    def submit(self, name: str, run: RemoteRun) -> None:
        with self._lock:
            self._runs[name] = run
            self._submit(name, run)

    def recover(self, name: str, run: RemoteRun) -> RemoteRun:
        with self._lock:
            return dataclasses.replace(self._runs.setdefault(name, run))

    def run(self, name: str) -> RemoteRun | None:
        """Return a copy of an allocation's state on the host; None if unknown."""
        with self._lock:
            run = self._runs.get(name)
            if run is None:
                return None
            self._end_if_lease_over(run)
            return dataclasses.replace(run)

    def pop_notes(self, name: str) -> list[str]:
        with self._lock:
            run = self._runs.get(name)
            if run is None or not run.notes:
                return []
            notes, run.notes = run.notes, []
            return notes

    def pop_ports(self) -> dict[str, int]:
        """Return the host's free ports that its agent chose: environment variable -> port.

        Each choice is returned by one call only. Later calls return {} until the agent has sent other ports.
        """
        with self._lock:
            ports, self._ports = self._ports, {}
            return ports

    def stop(self, name: str) -> None:
        with self._lock:
            run = self._runs.get(name)
            if run is not None and not run.is_stopping:
                run.is_stopping = True
                self._send({"do": "stop", "id": name})

    def kill(self, name: str, *, leaves_record: bool) -> None:
        """Kill an allocation on the host; a no-op if it is unknown or has ended.

        An allocation that was not sent to the agent yet ends at once and is never started. ``leaves_record``: see
        ``Backend.kill``.
        """
        with self._lock:
            run = self._runs.get(name)
            if run is None or run.exit is not None:
                return
            run.kill = leaves_record
            if run.request is not None and not run.is_sent:
                self._end(run, NodeExit(self.node_id, _KILLED, 9, "preempted"))
            self._send({"do": "kill", "id": name, "leaves_record": leaves_record})

    def forget(self, name: str) -> None:
        with self._lock:
            if self._runs.pop(name, None) is not None:
                self._send({"do": "forget", "id": name})

    def lost_reason(self) -> str | None:
        """Return why the host is lost; None while it is up or may still reconnect.

        A host that stops answering is lost at once. After any other disconnect, the host is lost ``_RECONNECT_GRACE_S`` later,
        because perhaps only its agent has ended.
        """
        with self._lock:
            if self._why_down is None or (
                not self._was_silent and time.monotonic() < self._down_s + _RECONNECT_GRACE_S
            ):
                return None
            return f"{self.host.name} is {self._why_down}"

    @property
    def is_silent(self) -> bool:
        """Whether the host is down because it does not answer.

        False if the host is up, or down for another reason, such as a refused connection.
        """
        return self._was_silent and self._why_down is not None

    def lose_all(self, why: str) -> None:
        """Mark the host's allocations as lost: their Slurm or Ray job lost the host.

        ``why`` is the reason for users. A host that does not answer may be up without a network: its allocations count as lost
        only when the lease ends and the host kills them.
        """
        with self._lock:
            self._is_released = True
            self._lost_reason = why
            if self._is_up and self._connection is not None:
                self._may_be_cut_off = time.monotonic() > self._connection.heard_s + _SILENT_END_S
            if not self._may_be_cut_off:
                for run in self._runs.values():
                    if run.exit is None:
                        self._end(run, NodeExit(self.node_id, _KILLED, 9, "lost", why))

    def _end_if_lease_over(self, run: RemoteRun) -> None:
        """Mark an allocation as lost if its host is down and the lease has ended."""
        # A connection may have extended the lease before its agent has answered.
        newest_s = self._connection.lease_ends_s if self._connection is not None else None
        ends_s = max(self._lease_ends_s, newest_s or 0.0)
        if run.exit is None and self._why_down is not None and time.monotonic() > ends_s + _MARGIN_S:
            why = self._lost_reason or f"{self.host.name} is {self._why_down}"
            cause: Cause = "unreachable" if self._lost_reason is None else "lost"
            self._end(run, NodeExit(self.node_id, _KILLED, 9, cause, why))

    def _end(self, run: RemoteRun, exit_: NodeExit) -> None:
        with self._lock:
            run.exit = exit_
            run.time_us = run.time_us or now_us()
            run.heard_s = time.monotonic()
        self._notify()

    def _submit(self, name: str, run: RemoteRun) -> None:
        if run.request is not None:
            run.is_sent = run.is_sent or self._is_up
            message = {"do": "submit", "id": name, "slots": list(run.slots), "request": run.request.to_json()}
            self._send(message, run.request.model_definition)

    def _send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        with self._lock:
            if self._is_up and self._connection is not None:
                self._connection.send(message, payload)

    # The connection

    def _run_loop(self) -> None:
        while not self._is_closing.is_set():
            try:
                why = self._connect_and_follow()
            except Exception:
                logger.exception("the connection to %s failed; reconnecting", self.host.name)
                why = "not usable: the master failed to connect to it; see `dstrial logs`"
            self._mark_down(why)
            self.has_tried.set()
            self._is_closing.wait(_RETRY_S)

    def _mark_down(self, why: str) -> None:
        is_wanted = not self._is_closing.is_set() and not self._is_released
        with self._lock:
            was_up = self._why_down is None
            if was_up:
                self._down_s = time.monotonic()
                self._since_us = now_us()
            self._why_down = why
            if is_wanted and (was_up or not self.has_tried.is_set()):
                for run in self._runs.values():
                    if run.exit is None:
                        self._note(
                            run,
                            f"is lost: {why}" if was_up else f"cannot be reached: {why}. {_ORPHAN_NOTICE}",
                        )
        self._streams.close()
        if is_wanted and (was_up or not self.has_tried.is_set()):
            logger.warning("%s is down: %s", self.host.name, why)
        if was_up:
            self._notify()

    def _connect_and_follow(self) -> str:
        """Connect, and process the agent's messages; return why the connection ended."""
        connection = HostConnection(self.host, self._settings.python, self._settings.transport)
        with self._lock:
            self._connection = connection
        try:
            why = self._start_agent(connection)
            return why if why is not None else self._follow(connection)
        finally:
            silent_s = time.monotonic() - connection.heard_s
            with self._lock:
                if self._is_up:
                    self._may_be_cut_off = silent_s > _SILENT_END_S
                self._is_up = False
            # Send ``outlive`` only if the allocations are to continue without this master.
            if silent_s > SILENT_S or self._is_released or not self._is_closing.is_set():
                connection.abandon()
            connection.close()
            # Only after the close: acknowledged heartbeats extend the lease until then.
            if connection.lease_ends_s is not None:
                self._lease_ends_s = connection.lease_ends_s

    def _start_agent(self, connection: HostConnection) -> str | None:
        """Check the host and start its agent; return an error message for users, or None."""
        answer = None
        try:
            answer = connection.next(self._settings.transport.connect_s + 1)
        except TimeoutError:
            self._was_silent = True
        if answer is None:
            problem = connection.start_problem()
            return f"{problem.got}. {problem.fix}"
        facts = facts_of(answer)
        interface = named_interface(os.environ)
        problems = fact_problems([self.host], [facts], own_versions(), environ=os.environ, interface=None)
        if problems:
            return "; ".join(f"{visible_line(problem.got)}. {problem.fix}" for problem in problems)
        settings, home = self._settings, facts.environment.get("HOME", "/")
        with self._lock:
            self._address = address_of(facts, interface)[0] or "127.0.0.1"
            live = [name for name, run in self._runs.items() if run.exit is None]
        connection.send(
            {
                "do": "become",
                "command": [settings.python, "-u", "-m", _AGENT],
                "environment": remote_environment(os.environ, facts.environment),
                "directory": home,
            }
        )
        connection.send(
            {
                "host": self.host.name,
                "job_id": self._job_id,
                "ends_with_parent": settings.transport.ends_with_parent,
                "cluster_id": settings.cluster_id,
                "slots": list(self.host.slots),
                "umask": settings.umask,
                "is_warm": settings.is_warm,
                "forks_with_accelerators": settings.forks_with_accelerators,
                "warm_idle_timeout_s": settings.warm_idle_timeout_s,
                "live": live,
            }
        )
        return None

    def _follow(self, connection: HostConnection) -> str:
        """Process the agent's messages until the connection ends; return why it ended."""
        began_s = time.monotonic()
        is_up = is_reported = False
        while not self._is_closing.is_set():
            limit_s = LOST_S if is_up else _HELLO_TIMEOUT_S
            silent_s = time.monotonic() - max(connection.heard_s, began_s)
            if silent_s > limit_s:
                self._was_silent = True
                return f"silent: no heartbeat for {limit_s:g} s"
            if is_up and (silent_s > SILENT_S) != is_reported:
                is_reported = not is_reported
                silence = f"is silent for {SILENT_S:g} s, and lost after {LOST_S:g} s"
                self._note_all(silence if is_reported else "answers again")
            try:
                frame = connection.next(BEAT_S)
            except TimeoutError:
                continue
            if frame is None:
                return f"disconnected: its connection has ended ({visible_line(last_line(connection.errors())) or 'no message'})"
            if "error" in frame:
                return visible_line(str(frame["error"]))
            if "hello" in frame:
                is_up = True
                self._on_hello(frame)
            else:
                self._on_frame(frame)
        return "disconnected: the master ends"

    def _on_hello(self, frame: Mapping[str, Any]) -> None:
        """Handle an agent's first message: mark the host as up, reconcile the allocations."""
        with self._lock:
            self._slots = tuple(
                dataclasses.replace(Slot(**slot), id=self._ids[int(slot["id"])]) for slot in frame["slots"]
            )
            self._is_up = True
            self._was_silent = False
            self._ports = dict(frame["ports"])
            self._why_down = None
            self._since_us = now_us()
            for name, run in self._runs.items():
                if run.exit is None:
                    self._reconcile(name, run, frame["hello"])
        logger.info("%s is up with %d slots", self.host.name, len(self._slots))
        self.has_tried.set()
        self._notify()

    def _reconcile(self, name: str, run: RemoteRun, there: Mapping[str, Mapping[str, Any]]) -> None:
        found = there.get(name)
        if found is not None:
            if run.handle is not None:
                self._note(run, "is connected again")
            run.request = None
            if found:
                run.handle = SupervisorHandle(int(found["pid"]), str(found["start_time"]))
            self._send({"do": "follow", "id": name, "size": _log_size(run.mirror)})
            if run.is_stopping:
                self._send({"do": "stop", "id": name})
        elif run.request is not None and run.kill is None:
            self._submit(name, run)
        else:
            why = f"{self.host.name} has no record of it any more"
            self._end(run, NodeExit(self.node_id, _KILLED, 9, "lost", why))
        if run.kill is not None:
            self._send({"do": "kill", "id": name, "leaves_record": run.kill})

    def _on_frame(self, frame: Mapping[str, Any]) -> None:
        if "stream" in frame:
            self._streams.handle(frame)
        elif "open" in frame:
            self._open_stream(int(frame["open"]))
        else:
            with self._lock:
                run = self._runs.get(frame["id"])
                self._ports = dict(frame.get("ports", self._ports))
            if run is None:
                return
            if "file" in frame:
                _write_mirror(run.mirror, frame)
            elif "exit_code" in frame:
                self._on_exit(run, frame)
            elif "refused" in frame:
                text = f"could not be started on {self.host.name}: {frame['refused']}"
                self._end(run, NodeExit(self.node_id, 1, None, "refused", text))
            else:
                with self._lock:
                    run.request = None
                    run.handle = SupervisorHandle(int(frame["pid"]), str(frame["start_time"]))
                if run.is_stopping:  # requested while the host was still preparing
                    self._send({"do": "stop", "id": frame["id"]})
                self._notify()

    def _on_exit(self, run: RemoteRun, frame: Mapping[str, Any]) -> None:
        saving = run.mirror / SAVING_DIRECTORY
        for uuid in frame["begun"]:
            saving.mkdir(mode=0o700, exist_ok=True)
            (saving / _file_name(uuid)).touch()
        cause: Cause = "lost" if frame["was_lost"] else "exited" if run.kill is None else "preempted"
        text = f"{frame['explanation']} on {self.host.name}" if frame["explanation"] else None
        with self._lock:
            run.is_consequence = bool(frame["is_consequence"])
            run.time_us = int(frame["time_us"])
        self._end(run, NodeExit(self.node_id, int(frame["exit_code"]), frame["signal"], cause, text))

    def _note_all(self, what: str) -> None:
        logger.warning("%s %s", self.host.name, what)
        with self._lock:
            for run in self._runs.values():
                if run.exit is None:
                    self._note(run, what)
        self._notify()

    def _note(self, run: RemoteRun, what: str) -> None:
        run.notes.append(f"{self.host.name} ({run.ranks}) {what}")

    def _open_stream(self, number: int) -> None:
        try:
            connection = socket.create_connection(("127.0.0.1", self._settings.master_port), CONNECT_S)
        except OSError:
            self._send({"stream": number, "end": True})
            return
        connection.settimeout(None)
        self._streams.add(number, connection)


def _write_mirror(mirror: Path, frame: Mapping[str, Any]) -> None:
    """Write, extend or delete a mirrored file, as an agent's message (``frame``) says."""
    path, at = mirror / _file_name(frame["file"]), frame["at"]
    if frame["data"] is None:
        path.unlink(missing_ok=True)
        return
    data = base64.b64decode(frame["data"])
    if at is None:
        replace_file(path, data, sync=False, is_private=True)
        return
    skipped = (path.stat().st_size if path.exists() else 0) - int(at)
    if skipped >= 0:
        with path.open("ab") as file:
            file.write(data[skipped:])


def _log_size(mirror: Path) -> int:
    path = mirror / LOG_NAME
    return path.stat().st_size if path.exists() else 0


def _file_name(name: str) -> str:
    """Return a path's last part, so that a host cannot write outside the mirror."""
    return Path(str(name)).name
