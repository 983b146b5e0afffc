"""Asks a fork server for processes, and starts and ends one."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import inspect
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dstrial.fork_server.fork import Program
from dstrial.fork_server.key import NVML_CHECK_VARIABLE, differing, key_of
from dstrial.fork_server.messages import MAX_FILES, receive, send
from dstrial.process_state import is_stopped

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""A fork takes some 10 ms; who does not answer in this time is ended."""
END_TIMEOUT_S = 2.0
WITH_COPIES = ("dstrial.launch", "dstrial.dsat.worker")
"""Modules that start others, which are then forks of what they have been before they began."""
_MEASURING_MODULES = ("dstrial.dsat.trial", "dstrial.dsat.worker")
MAX_KEPT_FILES = MAX_FILES - 4
"""How many open files a fork may have besides the three standard ones, and the one by which it is told to begin."""
SHARED_VARIABLE = "DSTRIAL_FORK_SERVER"
"""A variable: the socket of a fork server of another process, for masters of tests; without it a master has its own."""
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # linux/prctl.h
_adopting = threading.Lock()


def trains_trial_class(words: Sequence[str]) -> bool:
    """Return whether a command line launches ranks that import a trial class.

    These import ``dstrial.launch.imported_ahead`` before the user's module. A script says itself what is imported when.
    """
    if tuple(words[:2]) != ("-m", "dstrial.launch"):
        return False
    options = iter(words[2:])
    for word in options:
        if word == "-m":
            return next(options, None) in _MEASURING_MODULES
        if word.partition("=")[0] == "--trial":
            return True
        if not word.startswith("--") or word == "--":
            return False
        if "=" not in word:
            next(options, None)
    return False


class ForkRefusedError(Exception):
    """No process was forked; the message says why, and a new process will do."""


def _do_nothing(_: object) -> None:
    pass


class Connection:
    """The way to a fork server. Thread-safe.

    ``added`` are variables that its imports have set: a process without them gets them. Forks may differ in ``free`` ones.
    A ``child`` that nobody else waits for is killed if it does not answer.
    """

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        added: Mapping[str, str] = types.MappingProxyType({}),
        free: Sequence[str] = (),
        child: int | None = None,
    ) -> None:
        self._free = frozenset(free)
        self._child = child
        self._socket = connection
        self._added = added
        self._environment = {**added, **environment}
        self._lock = threading.Lock()
        connection.settimeout(ANSWER_TIMEOUT_S)

    def why_not(self, environment: Mapping[str, str], free: Collection[str] = ()) -> str:
        """Return why a process with this environment cannot be a fork; empty if it can."""
        names = differing(self._environment, {**self._added, **environment}, self._free.union(free))
        return f"{', '.join(names)}: not as where it was imported ahead" if names else ""

    def start_program(
        self,
        program: Program,
        files: Sequence[int],
        *,
        free: Collection[str] = (),
        known: Callable[[int], None] = _do_nothing,
    ) -> int:
        """Start a program as a child of this process; return its pid.

        ``known`` is called with the pid before it begins; where that raises, nothing begins.

        Raises:
            ForkRefusedError: only a new process will do.
        """
        why_not = self.why_not(program.environment, free)
        if why_not:
            raise ForkRefusedError(why_not)
        asked = {"program": program.to_json(), "call": None, "title": list(program.words)}
        with _adopting_orphans():
            return self._ask(asked | {"places": program.places, "is_adopted": True}, files, known)

    def start_call(
        self,
        file: Path,
        name: str,
        arguments: Sequence[str],
        files: Sequence[int],
        *,
        title: Sequence[str],
        places: Sequence[str] = (),
        known: Callable[[int], None] = _do_nothing,
    ) -> int:
        """Call a function in a fork that leads a session and outlives the server.

        ``file`` imports the standard library only; its function ``name`` gets ``Forks`` after the arguments. ``title`` is shown
        in /proc/PID/cmdline. Returns the pid of the server's child.

        Raises:
            ForkRefusedError: only a new process will do.
        """
        call = {"file": str(file), "name": name, "arguments": list(arguments)}
        asked = {"program": None, "call": call, "title": list(title), "is_adopted": False}
        return self._ask(asked | {"places": list(places)}, files, known)

    def close(self) -> None:
        """Let the server end."""
        self._socket.close()

    def _end_peer(self) -> None:
        """Have nothing more to do with who does not answer.

        A stopped process keeps the files that it was sent, so that nobody would see the end of what is written to them.
        """
        self._socket.close()  # whatever it still says answers nothing that will be asked
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)

    def _ask(self, asked: dict[str, Any], files: Sequence[int], known: Callable[[int], None]) -> int:
        wait, go = os.pipe()
        try:
            try:
                with self._lock:
                    answer = self._answer(asked, [*files, wait])
            finally:
                os.close(wait)
            if "pid" not in answer:
                raise ForkRefusedError(str(answer.get("refused")))
            pid = int(answer["pid"])
            known(pid)
            try:
                os.write(go, b"g")
            except BrokenPipeError:
                raise ForkRefusedError("the fork ended before it began") from None
            return pid
        finally:
            os.close(go)

    def _answer(self, message: dict[str, Any], files: Sequence[int]) -> dict[str, Any]:
        if self._child is not None and is_stopped(self._child):
            # Nobody waits for what will not come; whoever starts trials has others to look after.
            self._end_peer()
            raise ForkRefusedError("it is stopped (SIGSTOP)")
        try:
            send(self._socket, message, files)
            received = receive(self._socket)
        except OSError as error:
            self._end_peer()
            raise ForkRefusedError(f"it does not answer ({error})") from None
        if received is None:
            self._socket.close()
            raise ForkRefusedError("it has ended")
        return received[0]


class ForkServer(Connection):
    """A fork server of this process, or one that others have started."""

    def __init__(
        self,
        connection: socket.socket,
        environment: Mapping[str, str],
        added: Mapping[str, str] = types.MappingProxyType({}),
        free: Sequence[str] = (),
    ) -> None:
        super().__init__(connection, environment, added, free)
        self.key = key_of(environment)
        self._ready: dict[str, Any] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(
        cls,
        environment: Mapping[str, str],
        imports: Sequence[str],
        *,
        log: Path,
        python: str = sys.executable,
        listener: socket.socket | None = None,
        free: Sequence[str] = (),
        copied: Sequence[str] = WITH_COPIES,
    ) -> ForkServer:
        """Start a server that imports ``imports`` and ends with this process.

        ``listener`` lets others of this account ask it. ``copied`` are modules that start others, as ``WITH_COPIES``.
        """
        ours, theirs = socket.socketpair()
        server = cls(ours, key_of(environment), free=free)
        others = [] if listener is None else [listener.fileno()]
        options = {
            "descriptor": theirs.fileno(),
            "listener": others[0] if others else None,
            "free": list(free),
            "copied": list(copied),
            "imports": list(imports),
            # Room for the command lines that /proc shows of forks.
            "room": "-" * 256,
        }
        with theirs, log.open("ab") as output:
            server._process = subprocess.Popen(
                [python, "-m", "dstrial.fork_server.server", json.dumps(options)],
                # Asking NVML for devices leaves no state that a fork would not survive.
                env={**server.key, NVML_CHECK_VARIABLE: "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), *others],
                cwd="/",
                start_new_session=True,
            )
        server._child = server._process.pid
        return server

    @classmethod
    def connect(cls, path: str) -> ForkServer:
        """Return a server that another process has started, by the path of its socket."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(path)
        received = receive(connection)
        if received is None:
            raise ConnectionError(f"{path} answers nothing")
        answer = received[0]
        server = cls(connection, answer["environment"], added=answer["added"], free=answer["free"])
        server._ready = answer
        return server

    @property
    def pid(self) -> int | None:
        """Its process id; None for another process's."""
        return None if self._process is None else self._process.pid

    @property
    def was_ready(self) -> bool:
        """Whether it had imported everything when it was last asked."""
        return bool(self._ready and self._ready["ready"])

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether it has imported everything, within a time.

        Raises:
            ForkRefusedError: it has failed; the message says why.
        """
        if self._ready is None:
            if self._socket.fileno() < 0:
                raise ForkRefusedError("it has ended")
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return False
            try:
                received = receive(self._socket)
            except OSError:
                received = None
            ended: dict[str, Any] = {"ready": False, "failures": {"": "it has ended"}}
            self._ready = ended if received is None else received[0]
        if not self._ready["ready"]:
            failures = [f"{name}: {text}" if name else text for name, text in self._ready["failures"].items()]
            raise ForkRefusedError("; ".join(failures))
        return True

    def close(self) -> None:
        """End it, if it is this process's; what was forked from it goes on."""
        super().close()
        if self._process is None:
            return
        try:
            self._process.wait(END_TIMEOUT_S if self._ready else 0.01)
        except subprocess.TimeoutExpired:
            # Still importing, or stopped.
            self._process.kill()
            self._process.wait()


class OwnForkServer:
    """A fork server that a process starts when it first needs one. Thread-safe.

    It is waited for: importing takes as long in it as it would in the first of its forks. A fork that has a copy of what it was
    needs none.
    """

    pids: ClassVar[set[int]] = set()
    """Of all that this process has started."""

    def __init__(self, imports: Sequence[str]) -> None:
        self._imports = tuple(imports)
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    def get(self, environment: Mapping[str, str], timeout_s: float) -> Connection | None:
        """Return the server once it has imported everything; None where there is none."""
        if of_this_process is not None and not of_this_process.why_not(environment):
            return of_this_process
        with self._lock:
            try:
                if self._server is None or self._server.why_not(environment):
                    self._close()
                    self._server = ForkServer.start(environment, self._imports, log=Path(os.devnull))
                    self.pids.add(self._server.pid or 0)
                    atexit.register(self._server.close)
                return self._server if self._server.is_ready(timeout_s) else None
            except (OSError, ForkRefusedError) as error:
                logger.info("a new process does what a fork could: %s", error)
                self._close()
                return None

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class ForkedPopen(subprocess.Popen[Any]):
    """A ``subprocess.Popen`` whose ``[sys.executable, ...]`` is a fork, if it may be.

    ``told`` is called with the reason where it is a new process all the same, ``known`` with its pid before it begins.
    ``start_new_group`` makes it the leader of a process group in its parent's session.
    """

    def __init__(
        self,
        connection: Connection | None,
        args: Sequence[str],
        *,
        told: Callable[[str], None] = _do_nothing,
        start_new_group: bool = False,
        free: Collection[str] = (),
        known: Callable[[int], None] = _do_nothing,
        **options: Any,
    ) -> None:
        self._connection = connection
        self._told = told
        self._start_new_group = start_new_group
        self._free = free
        self._known = known
        super().__init__(args, **options)

    def _execute_child(self, *given: Any) -> None:
        execute = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(execute).bind(*given).arguments
        if self._connection is None or asked["args"][0] != sys.executable:
            execute(*given)
            return
        kept = tuple(sorted(asked["pass_fds"]))
        if len(kept) > MAX_KEPT_FILES or asked["preexec_fn"]:
            self._told("it gets many files of its own, or a function to call")
            execute(*given)
            return
        program = Program(
            tuple(map(os.fspath, asked["args"][1:])),
            dict(os.environ if asked["env"] is None else asked["env"]),
            os.fspath(Path.cwd() / os.fsdecode(asked["cwd"] or "")),
            bool(asked["start_new_session"]),
            self._start_new_group,
            kept,
        )
        pipes = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
        files = [*(number if file == -1 else file for number, file in enumerate(pipes)), *kept]
        try:
            self.pid = self._connection.start_program(program, files, free=self._free, known=self._known)
        except ForkRefusedError as reason:
            self._told(str(reason))
            execute(*given)
            return
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Make this process the parent of those below it whose own parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _adopting:
        before = ctypes.c_int()
        libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


of_this_process: Connection | None = None
"""The way to what can be forked for this process, ranks of a launcher for one, if it is a fork itself."""
