"""Starts ranks on several hosts, by ssh or Slurm, and names the host that failed.

Preflight's connection to a host becomes the host's launcher (:mod:`dstrial.launch.node`). Both sides send a heartbeat every
second. A host that is silent for ``LOST_S`` is lost: it is named, and the ranks of the others, which would wait for it in a
collective, are killed; the lost host kills its own when its lease ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import queue
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from dstrial.config.schema import DEFAULT_PREEMPTION_TIMEOUT_S
from dstrial.context_directory import list_context
from dstrial.errors import LaunchError
from dstrial.hosts.connection import HostConnection
from dstrial.hosts.environment import travelling
from dstrial.hosts.preflight import Preflight, ReadyHost
from dstrial.hosts.transport import BEAT_S, LOST_S, last_line
from dstrial.launch.failures import LaunchOutcome, RankEnding, RankFailure, first_ending
from dstrial.launch.node import CONTEXT, FILES, UNSTARTED, NodeRequest
from dstrial.launch.output import OnLine
from dstrial.ranks.job_secret import SECRET_VARIABLE, new_secret

START_S = 120.0
"""How long a host's launcher may be silent before its ranks begin, seconds.

It imports torch, perhaps from a cold network file system, and loading a library keeps its other threads waiting. ssh itself
notices a host that is cut off then, after 25 s.
"""
_KILLED_S = 10.0
_LOST_EXIT_CODE = 255  # ssh's own, for a connection that ended
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NODE = ["-m", "dstrial.launch.node"]


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What all hosts run.

    Attributes:
        command: of each rank, with this machine's paths.
        context_dir: of the model definition, or the directory of a script.
        config_path: the experiment's file; None without one.
        config: the experiment config with its defaults; None without one.
        log_dir: on the file system that all hosts share, as is ``tracebacks_dir``.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    is_trial: bool
    context_dir: Path
    config_path: Path | None = None
    config: Mapping[str, Any] | None = None
    hyperparameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    log_dir: Path | None = None
    tracebacks_dir: Path | None = None
    shutdown_timeout_s: float = DEFAULT_PREEMPTION_TIMEOUT_S

    @property
    def paths(self) -> list[Path]:
        """What a host has to see, or is sent."""
        return [self.context_dir.resolve(), *([self.config_path.resolve()] if self.config_path else [])]


def run_on_hosts(
    job: Job,
    preflight: Preflight,
    *,
    python: str,
    on_line: OnLine,
    on_note: Callable[[str], None],
    on_stop: Callable[[str], None] | None = None,
    stop_signals: Sequence[signal.Signals] = (),
) -> LaunchOutcome:
    """Run a job's ranks on all hosts and wait for them; uses the connections up.

    The first SIGINT, SIGTERM or SIGHUP, or one of ``stop_signals``, reaches all ranks as SIGTERM, a SIGINT after that kills
    them. ``on_line`` gets rank, stream and line, ``on_note`` messages about hosts, ``on_stop`` the name of a signal that is
    passed on.

    Raises:
        LaunchError: a host could not start its ranks; a failed rank or a lost host is an outcome.
    """
    try:
        crew = _Hosts(job, preflight, python, on_line, on_note, on_stop)
        with crew.signals(stop_signals):
            return crew.run()
    finally:
        preflight.close()


class _Feeder:
    """Writes messages and heartbeats to one host, in a thread."""

    def __init__(self, connection: HostConnection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dstrial-host-feeder", daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any], data: bytes = b"") -> None:
        self._messages.put((message, data))

    def close(self) -> None:
        self._messages.put(None)

    def _run(self) -> None:
        while True:
            try:
                item = self._messages.get(timeout=BEAT_S)
            except queue.Empty:
                self._connection.ping()
                continue
            if item is None:
                return
            self._connection.send(*item)
            if item[1]:  # sending may take long, and nobody answers meanwhile
                self._connection.heard_s = time.monotonic()


@dataclasses.dataclass(slots=True)
class _Running:
    """One host while it runs.

    Attributes:
        batches: trained by each of its ranks, by number.
        arrival: order of its first failure among all hosts; None without one.
        outcome: how its ranks ended; None while they run, and for a lost host.
        is_consequence: whether a rank elsewhere caused its first failure.
        lost: why it is lost, without a full stop; empty if it is not.
        has_begun: whether its launcher has finished its imports.
    """

    ready: ReadyHost
    feeder: _Feeder
    first_rank: int
    batches: dict[int, int] = dataclasses.field(default_factory=dict)
    arrival: int | None = None
    outcome: LaunchOutcome | None = None
    is_consequence: bool = False
    lost: str = ""
    is_told_quiet: bool = False
    has_begun: bool = False

    @property
    def name(self) -> str:
        return self.ready.host.name

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or bool(self.lost)

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.place})"

    @property
    def place(self) -> str:
        last = self.first_rank + len(self.ready.host.slots) - 1
        ranks = f"rank {last}" if last == self.first_rank else f"ranks {self.first_rank} to {last}"
        if not self.batches:  # a script of which nothing is known
            return ranks
        batch = max(self.batches.values())
        return ranks + (f", last seen at batch {batch}" if batch else ", before its first batch")


class _Hosts:
    """All hosts of one launch; the thread that calls ``run`` decides everything."""

    def __init__(
        self,
        job: Job,
        preflight: Preflight,
        python: str,
        on_line: OnLine,
        on_note: Callable[[str], None],
        on_stop: Callable[[str], None] | None,
    ) -> None:
        self._job, self._preflight, self._python = job, preflight, python
        self._on_line, self._on_note, self._on_stop = on_line, on_note, on_stop
        self._frames: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        self._signals: list[signal.Signals] = []
        self._stops: list[int] = []
        self._num_passed_on = 0
        self._arrivals = 0
        self._killed_s: float | None = None
        self._hosts: list[_Running] = []
        self._error = ""

    @contextlib.contextmanager
    def signals(self, more: Sequence[signal.Signals] = ()) -> Iterator[None]:
        """Record signals within the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(number: int, _frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(number))

        handled = [signal.SIGINT, signal.SIGTERM, *more]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup's promise is kept
            handled.append(signal.SIGHUP)
        previous: dict[signal.Signals, Any] = {one: signal.signal(one, on_signal) for one in handled}
        # Hosts would take a stopped launcher for a lost one, and end their ranks.
        previous[signal.SIGTSTP] = signal.signal(
            signal.SIGTSTP, lambda _number, _frame: self._stops.append(1)
        )
        try:
            yield
        finally:
            for one, handler in previous.items():
                signal.signal(one, signal.SIG_DFL if handler is None else handler)

    def run(self) -> LaunchOutcome:
        self._start()
        try:
            while not all(host.is_over for host in self._hosts):
                self._pass_signals_on()
                try:
                    number, frame = self._frames.get(timeout=0.2)
                except queue.Empty:
                    pass
                else:
                    self._take(self._hosts[number], frame)
                self._look()
        finally:
            for host in self._hosts:
                host.feeder.close()
        if self._error:
            raise LaunchError(self._error)
        return self._outcome()

    def _start(self) -> None:
        archive: bytes | None = None
        secret = {SECRET_VARIABLE: new_secret()}
        first_rank = 0
        for number, ready in enumerate(self._preflight.hosts):
            is_here = ready.sees[str(self._job.context_dir.resolve())]
            if not is_here and archive is None:
                archive = packed_context(self._job.context_dir)
            data = b"" if is_here or archive is None else archive
            request = self._request(number, ready, secret, archive_bytes=len(data), is_here=is_here)
            home = ready.facts.environment.get("HOME", "/")
            become = {
                "do": "become",
                "command": [self._python, "-u", *_NODE],
                "environment": travelling(os.environ, ready.facts.environment),
                "directory": str(self._job.context_dir.resolve()) if is_here else home,
            }
            feeder = _Feeder(ready.connection)
            self._hosts.append(_Running(ready, feeder, first_rank))
            first_rank += len(ready.host.slots)
            feeder.put(become)
            feeder.put(dataclasses.asdict(request), data)
            threading.Thread(
                target=self._read, args=(number, ready.connection), name="dstrial-host-frames", daemon=True
            ).start()

    def _request(
        self, number: int, ready: ReadyHost, secret: Mapping[str, str], *, archive_bytes: int, is_here: bool
    ) -> NodeRequest:
        job, hosts = self._job, self._preflight.hosts
        env = {**job.env, **secret}
        if len(hosts) > 1:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                if name not in os.environ and name not in env:
                    env[name] = ready.interface
        if ready.host.is_filtered and ready.facts.num_accelerators:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ready.host.slots))
        texts: dict[str, str] = {}
        names: dict[str, str] = {}
        if not is_here:
            names[str(job.context_dir.resolve())] = CONTEXT
        if job.config_path is not None and not ready.sees[str(job.config_path.resolve())]:
            texts[job.config_path.name] = job.config_path.read_text(encoding="utf-8")
            names[str(job.config_path.resolve())] = f"{FILES}/{job.config_path.name}"
        return NodeRequest(
            command=[names.get(word, word) for word in job.command],
            num_ranks=len(ready.host.slots),
            node_rank=number,
            hosts=[one.host.name for one in hosts],
            ranks_by_node=[len(one.host.slots) for one in hosts],
            master_addr=hosts[0].address,
            master_port=self._preflight.port,
            env=env,
            is_trial=job.is_trial,
            config=None if job.config is None else dict(job.config),
            hyperparameters=dict(job.hyperparameters),
            context_dir=str(job.context_dir.resolve()),
            log_dir=None if job.log_dir is None else str(job.log_dir),
            tracebacks_dir=None if job.tracebacks_dir is None else str(job.tracebacks_dir),
            shutdown_timeout_s=job.shutdown_timeout_s,
            texts=texts,
            archive_bytes=archive_bytes,
        )

    def _read(self, number: int, connection: HostConnection) -> None:
        while True:
            frame = connection.next()
            self._frames.put((number, frame))
            if frame is None:
                return

    def _pass_signals_on(self) -> None:
        if self._stops:
            self._stops.clear()
            self._on_note(
                "Ctrl-Z is ignored: hosts would take a stopped launcher for a lost one, and end their ranks"
            )
        for one in self._signals[self._num_passed_on :]:
            self._num_passed_on += 1
            told = one if one in _PASSED_ON else signal.SIGTERM
            self._tell_all({"do": "stop", "signal": told.name})
            if self._num_passed_on == 1 and self._on_stop is not None:
                self._on_stop(one.name)

    def _tell_all(self, message: dict[str, Any], but: _Running | None = None) -> None:
        for host in self._hosts:
            if host is not but and not host.is_over:
                host.feeder.put(message)

    def _take(self, host: _Running, frame: dict[str, Any] | None) -> None:
        if host.is_over:
            return
        if frame is None:
            if host.ready.connection.exit_code == UNSTARTED:
                host.lost = "it was ended with the others, before its ranks began"
            else:
                self._lose(host, self._ending_of(host))
            return
        if "line" in frame:
            rank, stream, text = frame["line"]
            self._on_line(rank, stream, text)
        elif "beat" in frame:
            host.has_begun = host.has_begun or frame["is_ready"]
            host.batches = {int(rank): batch for rank, batch in frame["beat"].items()}
            if host.is_told_quiet:
                host.is_told_quiet = False
                self._on_note(f"{host.name} answers again")
        elif "note" in frame:
            self._on_note(f"{host.name}: {frame['note']}")
        elif "failing" in frame:
            self._fail(host)
        elif "error" in frame:
            self._error = self._error or f"{host.name}: {frame['error']}"
            host.lost = "it could not start its ranks"
            self._kill_others(host, f"{host.name} could not start its ranks")
        elif "outcome" in frame:
            host.outcome = LaunchOutcome.from_json(frame["outcome"])
            host.is_consequence = bool(frame["ending"] and frame["ending"]["is_consequence"])
            if host.outcome.first_failure is not None or host.outcome.exit_code:
                self._fail(host)

    def _fail(self, host: _Running) -> None:
        if host.arrival is None:
            self._arrivals += 1
            host.arrival = self._arrivals
            self._tell_all({"do": "peer failed", "why": f"a rank on {host.name} has failed"}, host)

    def _ending_of(self, host: _Running) -> str:
        code, errors = host.ready.connection.exit_code, host.ready.connection.errors()
        last = last_line(errors)
        said = f" ({last})" if last else ""
        if code == _LOST_EXIT_CODE or code is None:
            return f"the connection to it ended{said}"
        if code > 128:
            return f"its launcher was killed by signal {code - 128}{said}"
        return f"its launcher ended with exit code {code} and no word{said}"

    def _lose(self, host: _Running, why: str) -> None:
        if self._killed_s is not None and host.arrival is None:
            host.lost = "it was ended with the others"
            return
        if host.arrival is None:
            self._arrivals += 1
            host.arrival = self._arrivals
        host.lost = why
        self._on_note(f"{host.shown} is lost: {why}; the ranks of the other hosts are ended")
        self._kill_others(host, f"{host.name} is lost")

    def _kill_others(self, host: _Running, why: str) -> None:
        host.ready.connection.abandon()
        if self._killed_s is None:
            self._killed_s = time.monotonic()
            self._tell_all({"do": "kill", "why": why}, host)

    def _look(self) -> None:
        now_s = time.monotonic()
        for host in self._hosts:
            if host.is_over:
                continue
            silent_s = now_s - host.ready.connection.heard_s
            limit_s = LOST_S if host.has_begun else START_S
            if silent_s > limit_s:
                self._lose(host, f"it has not answered for {silent_s:.0f} s")
            elif silent_s > limit_s / 2 and not host.is_told_quiet:
                host.is_told_quiet = True
                self._on_note(
                    f"{host.shown} has not answered for {silent_s:.0f} s; it counts as lost after {limit_s:g} s"
                )
            elif self._killed_s is not None and now_s > self._killed_s + _KILLED_S:
                host.lost = "it did not end in time"
                host.ready.connection.abandon()

    def _outcome(self) -> LaunchOutcome:
        """Join the outcomes: the first failure by arrival and cause, not by clocks."""
        endings = []
        exit_codes: list[int] = []
        for host in self._hosts:
            failure = None if host.outcome is None else host.outcome.first_failure
            if host.lost and host.arrival is not None:
                failure = RankFailure(
                    rank=host.first_rank,
                    local_rank=0,
                    pid=0,
                    exit_code=_LOST_EXIT_CODE,
                    signal_name=None,
                    host=host.name,
                    error=f"{host.lost[0].upper()}{host.lost[1:]} ({host.place}).",
                    summary=f"{host.lost} ({host.place})",
                    is_lost=True,
                    advice=f"Go on from the last checkpoint, without the host by --exclude {host.name}.",
                )
            if failure is not None:
                endings.append(RankEnding(failure, float(host.arrival or 0), host.is_consequence))
            codes = (_LOST_EXIT_CODE,) * len(host.ready.host.slots)
            exit_codes += codes if host.outcome is None else host.outcome.exit_codes
        ended = [host.outcome for host in self._hosts if host.outcome is not None]
        at_once = any(one.ended_at_once for one in ended)
        first = first_ending(endings)
        exit_code = max(exit_codes, default=0)
        # A rank without a trained batch ends at once when it is stopped, and ranks of other hosts may lose it.
        if (
            first is not None
            and first.is_consequence
            and self._signals
            and 128 + signal.SIGTERM in exit_codes
        ):
            first = None
        if at_once:
            exit_code = 128 + signal.SIGINT
        elif first is not None:
            exit_code = first.failure.exit_code or 1
        return LaunchOutcome(
            exit_code,
            None if first is None else first.failure,
            tuple(exit_codes),
            # Slurm asks the ranks of its steps by itself.
            stopped_by=self._signals[0].name
            if self._num_passed_on
            else next((one.stopped_by for one in ended if one.stopped_by is not None), None),
            # With a lost host all are: there is nothing to wait for.
            killed_ranks=()
            if self._killed_s is not None
            else tuple(rank for one in ended for rank in one.killed_ranks),
            ended_at_once=at_once,
        )


def packed_context(context_dir: Path) -> bytes:
    """Return a context directory as a tar archive; refuse one that is too large."""
    context = list_context(context_dir)
    context.require_packable()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1, dereference=True) as archive:
        for file in context.files:
            archive.add(file.path, file.name, recursive=False)
    return packed.getvalue()
