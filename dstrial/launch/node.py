"""The launcher of one host among several, told by another one over ssh.

``python -m dstrial.launch.node`` reads a line of JSON from its input, then starts its ranks and says by lines what they do. It
ends its ranks when its input ends (whoever started it is gone), and kills them when it hears nothing for ``LEASE_S``: the cable
is cut, and elsewhere the job goes on without this host. Not meant to be typed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import sys
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrial import collector, determined_imports
from dstrial.config.dotted_keys import dstrial_section
from dstrial.errors import DstrialError
from dstrial.hosts.remote import PREFIX
from dstrial.hosts.transport import BEAT_S, LEASE_S
from dstrial.local.experiment_file import EXPERIMENT_VARIABLE, write_experiment
from dstrial.resume.locate import saved_run_to_resume
from dstrial.scratch import scratch_directory

if TYPE_CHECKING:
    from dstrial.launch.failures import LaunchOutcome
    from dstrial.launch.local_ranks import RunningRanks

CONTEXT = "{context}"
"""Begins words of a command that name something in code that has travelled."""
FILES = "{files}"
"""Begins words of a command that name a file whose text has travelled."""
UNSTARTED = 75
"""Exit code of a launcher that was told to end before its ranks began."""
_STOP_S = 20.0
_KILL_S = 3.0
_LOOK_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRequest:
    """What a host is to run.

    Attributes:
        command: of each rank.
        num_ranks: on this host.
        node_rank: which host this is.
        hosts: names of all.
        ranks_by_node: on each host.
        master_addr: of the first host.
        master_port: free there.
        env: variables of the ranks.
        is_trial: whether the command trains a trial, so that ranks need no store of the launcher's and may be forks.
        config: the experiment config with its defaults; None without one.
        hyperparameters: concrete ones.
        context_dir: of the model definition, or of a script.
        log_dir: as ``run_ranks`` takes it.
        tracebacks_dir: as ``run_ranks`` takes it.
        shutdown_timeout_s: as ``run_ranks`` takes it.
        texts: files to make, by name.
        archive_bytes: length of the tar archive behind the request, 0 if the context is here already.
    """

    command: list[str]
    num_ranks: int
    node_rank: int
    hosts: list[str]
    ranks_by_node: list[int]
    master_addr: str
    master_port: int
    env: dict[str, str]
    is_trial: bool
    config: dict[str, Any] | None
    hyperparameters: dict[str, Any]
    context_dir: str
    log_dir: str | None
    tracebacks_dir: str | None
    shutdown_timeout_s: float
    texts: dict[str, str]
    archive_bytes: int


class _Line:
    """The way back: one JSON line after another, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def say(self, message: Mapping[str, Any]) -> None:
        """Write a line; nothing if nobody listens any more."""
        data = (PREFIX + json.dumps(message) + "\n").encode()
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(1, data) :]


class _Link:
    """Hears what the other side wants, and watches that it lives; ranks come later."""

    def __init__(self, line: _Line) -> None:
        self._line = line
        self._running: RunningRanks | None = None
        self._heard_s = time.monotonic()
        self._stop: signal.Signals | None = None
        self._is_closed = threading.Event()
        self._why_killed = ""
        self._is_done = threading.Event()
        for run in (self._hear, self._watch):
            threading.Thread(target=run, name="dstrial-node-link", daemon=True).start()

    def begin(self, running: RunningRanks) -> None:
        """Obey with these ranks from now on."""
        # From now on: while torch is loaded no other thread runs, and none has heard anything.
        self._heard_s = time.monotonic()
        self._running = running
        if self._stop is not None:
            running.supervisor.request_stop(self._stop)

    def end(self) -> None:
        """Watch no more: the ranks have ended."""
        self._is_done.set()

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            for line in io.BufferedReader(io.FileIO(0, "rb", closefd=False)):
                self._heard_s = time.monotonic()
                message = json.loads(line) if line.strip() else {}
                what = message.get("do")
                if what == "stop":
                    self._request_stop(signal.Signals[message["signal"]])
                elif what == "peer failed" and self._running is not None:
                    self._running.supervisor.tell_peer_failed()
                elif what in ("kill", "peer failed"):
                    threading.Thread(target=self._kill, args=(message["why"],), daemon=True).start()
        self._is_closed.set()

    def _request_stop(self, signal_: signal.Signals) -> None:
        self._stop = signal_
        if self._running is not None:
            self._running.supervisor.request_stop(signal_)

    def _watch(self) -> None:
        is_told, closed_s, beat_s = False, None, 0.0
        while not self._is_done.wait(_LOOK_S):
            now_s = time.monotonic()
            running = self._running
            if running is not None and running.supervisor.is_failing and not is_told:
                is_told = True
                self._line.say({"failing": True})
            if now_s >= beat_s + BEAT_S:
                beat_s = now_s
                positions = {} if running is None else running.positions()
                self._line.say({"beat": positions, "is_ready": running is not None})
            if self._is_closed.is_set() and closed_s is None:
                closed_s = now_s
                self._request_stop(signal.SIGTERM)
            if closed_s is not None and (running is None or now_s > closed_s + _STOP_S):
                self._kill("the launcher that started this one is gone")
            if running is not None and closed_s is None and now_s > self._heard_s + LEASE_S:
                self._kill(f"nothing was heard for {LEASE_S:g} s from the launcher that started this one")

    def _kill(self, why: str) -> None:
        """Kill the ranks; whatever this launcher waits for, it ends with them."""
        if self._why_killed:
            return
        self._why_killed = why
        print(f"dstrial.launch: {why}: ranks are killed", file=sys.stderr, flush=True)  # noqa: T201  # a command prints
        if self._running is not None:
            self._running.supervisor.kill_now()
        if self._running is None:
            os._exit(UNSTARTED)
        if not self._is_done.wait(_KILL_S):
            os._exit(128 + signal.SIGKILL)  # its ranks end with it, by their parent-death signal


def main() -> int:
    """Start this host's ranks and return the exit code of its launch."""
    line = _Line()
    try:
        request = _read_request()
        with scratch_directory("dstrial-node-") as directory:
            outcome, ending = _run(request, directory, line)
    except DstrialError as error:
        line.say({"error": str(error)})
        return 2
    line.say({"outcome": outcome.to_json(), "ending": ending})
    return outcome.exit_code


def _read_request() -> NodeRequest:
    data = b""
    while not data.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)
        data += byte
    return NodeRequest(**json.loads(data))


def _run(request: NodeRequest, directory: Path, line: _Line) -> tuple[LaunchOutcome, dict[str, Any] | None]:
    context_dir = _context(request, directory)
    link = _Link(line)  # what stands in the input from now on is for it
    names = {CONTEXT: str(context_dir), FILES: str(directory)}
    command = [_resolved(word, names) for word in request.command]
    os.chdir(context_dir)
    config = request.config
    env = dict(request.env)
    env |= determined_imports.variables({**os.environ, **env}, config)
    with collector.paused_for_good():
        from dstrial.launch.local_ranks import Placement, run_ranks
        from dstrial.launch.stalls.stall_rules import StallSettings
    if config is not None and not request.is_trial:
        env |= _script_variables(request, context_dir, directory, env)
    running: list[RunningRanks] = []

    def on_ready(ranks: RunningRanks) -> None:
        running.append(ranks)
        link.begin(ranks)

    try:
        outcome = run_ranks(
            command,
            num_ranks=request.num_ranks,
            env=env,
            log_dir=None if request.log_dir is None else Path(request.log_dir),
            shutdown_timeout_s=request.shutdown_timeout_s,
            on_line=lambda rank, stream, text: line.say({"line": [rank, stream, text]}),
            placement=Placement(
                tuple(request.ranks_by_node), request.node_rank, request.master_addr, request.master_port
            )
            if len(request.hosts) > 1
            else None,
            serves_store=not request.is_trial,
            tracebacks_dir=None if request.tracebacks_dir is None else Path(request.tracebacks_dir),
            on_start=lambda text: line.say({"note": text}),
            stalls=StallSettings.from_config(config),
            on_ready=on_ready,
        )
    finally:
        link.end()
    ending = running[0].supervisor.first_ending()
    told = None if ending is None else {"is_consequence": ending.is_consequence}
    return outcome, told


def _context(request: NodeRequest, directory: Path) -> Path:
    """Return the directory of the code, which may have travelled."""
    for name, text in request.texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    if not request.archive_bytes:
        return Path(request.context_dir)
    data = bytearray()
    while len(data) < request.archive_bytes:
        part = os.read(0, min(request.archive_bytes - len(data), 1 << 20))
        if not part:
            raise SystemExit(1)
        data += part
    context_dir = directory / "context"
    context_dir.mkdir()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(context_dir, filter="data")
    return context_dir


def _resolved(word: str, names: Mapping[str, str]) -> str:
    for name, path in names.items():
        if word.startswith(name):
            return path + word.removeprefix(name)
    return word


def _script_variables(
    request: NodeRequest, context_dir: Path, directory: Path, env: Mapping[str, str]
) -> dict[str, str]:
    """Name the experiment and its DeepSpeed config to ranks of a script."""
    from dstrial.launch.accelerate_environment import accelerate_variables

    assert request.config is not None
    path = directory / "experiment.json"
    write_experiment(path, request.config, request.hyperparameters)
    accelerate = accelerate_variables(
        request.hyperparameters,
        num_ranks=sum(request.ranks_by_node),
        directory=directory,
        environ={**os.environ, **env},
        context_dir=context_dir,
        extents=dstrial_section(request.config),
        resumed=saved_run_to_resume(),
    )
    return {EXPERIMENT_VARIABLE: str(path), **accelerate}


if __name__ == "__main__":
    sys.exit(main())
