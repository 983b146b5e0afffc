"""Start programs in spares (idle forks) of a fork server or of this process."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dstrial.fork_server import differing, fork, key_of, server
from dstrial.fork_server.fork import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, Program, prctl

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0  # a fork takes some 10 ms; a server without an answer in this time is killed
END_TIMEOUT_S = 2.0  # grace period of a closed server, after which it is killed
_adopting = threading.Lock()


class ForkRefusedError(Exception):
    """A program cannot run as a fork; the message says why it needs a new process."""


def trains_trial_class(words: Sequence[str]) -> bool:
    """Return whether a Python command is ``-m dstrial.launch`` with ``--trial``.

    ``words`` are the command without the interpreter. Such a command trains a trial class, not a script, and can run in a fork.
    Its ranks import ``dstrial.launch.imported_ahead`` before the user's module, as a fork server does.
    """
    if tuple(words[:2]) != ("-m", "dstrial.launch"):
        return False
    options = iter(words[2:])
    for word in options:
        if word.partition("=")[0] == "--trial":
            return True
        if not word.startswith("--") or word == "--":
            return False
        if "=" not in word:
            next(options, None)
    return False


class ForkedProcess:
    """A forked child with the methods of ``subprocess.Popen`` that dstrial uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 0  # reaped elsewhere, or SIGCHLD is ignored; as subprocess does
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        give_up_at_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up_at_s is not None and time.monotonic() > give_up_at_s:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def start_from_spare(program: Program, files: Sequence[int]) -> ForkedProcess:
    """Start a program in a fork of this process's spare (an idle fork), as a child.

    ``files`` are open descriptors; in the program they have the numbers ``program.numbers``.

    Raises:
        ForkRefusedError: the program cannot run in a fork; the message says why, or is empty if this process has no spare.
    """
    if fork.spare is None:
        raise ForkRefusedError("")
    connection = socket.socket(fileno=fork.spare)
    connection.settimeout(ANSWER_TIMEOUT_S)
    try:
        with _adopting_orphans():
            received = _ask_for_spare(connection, fork.CHILD)
    except ForkRefusedError:
        end_spare()  # a broken spare would delay every later program
        raise
    finally:
        connection.detach()
    return ForkedProcess(start_program(received, program, files))


def fork_or_none(program: Program, files: Sequence[int]) -> ForkedProcess | None:
    """Start a program as ``start_from_spare`` does; return None if this is refused.

    The reason is logged, unless this process has no spare.
    """
    try:
        return start_from_spare(program, files)
    except ForkRefusedError as reason:
        if str(reason):
            logger.warning("%s starts as a new process, not as a fork: %s", program.words[1], reason)
        return None


def end_spare() -> None:
    if fork.spare is not None:
        os.close(fork.spare)
        fork.spare = None


def _ask_for_spare(connection: socket.socket, request: bytes) -> int:
    answer, received = _ask(connection, request)
    if not received:
        raise ForkRefusedError(answer[1:].decode())
    return received[0]


def start_program(spare: int, program: Program, files: Sequence[int]) -> int:
    """Run a program in an idle fork; return the fork's pid.

    Args:
        spare: socket of the idle fork; closed on return.
        program: the program.
        files: open descriptors; in the program they have the numbers ``program.numbers``.

    Raises:
        ForkRefusedError: the program cannot run in this fork, which has ended; the caller must start a new process.
    """
    with socket.socket(fileno=spare) as connection, os.fdopen(os.memfd_create("program"), "w+b") as text:
        connection.settimeout(ANSWER_TIMEOUT_S)
        pid = int(_ask(connection, fork.PID)[0])
        if len(files) > fork.MAX_FILES:
            raise ForkRefusedError("it gets many files of its own")
        text.write(json.dumps(dataclasses.asdict(program)).encode())
        text.flush()
        try:
            problem = _ask(connection, fork.PROGRAM, [text.fileno(), *files])[0][1:].decode()
        except ForkRefusedError as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            problem = str(error)
    if problem:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        raise ForkRefusedError(problem)
    return pid


def _ask(connection: socket.socket, request: bytes, files: Sequence[int] = ()) -> tuple[bytes, list[int]]:
    """Send a request; wait for the response; return its bytes and file descriptors.

    If ``request`` is empty, nothing is sent.

    Raises:
        ForkRefusedError: the other process has ended or does not answer.
    """
    try:
        if request:
            socket.send_fds(connection, [request], list(files))
        answer, received, _, _ = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise ForkRefusedError(f"it does not answer ({error})") from None
    if not answer:
        raise ForkRefusedError("it has ended")
    return answer, received


class ForkServer:
    """Controls a fork server process, which ends when this process ends. Thread-safe."""

    def __init__(
        self,
        environment: Mapping[str, str],
        modules: Sequence[str],
        *,
        log: Path,
        python: str = sys.executable,
        program: Sequence[str] = ("-m", server.__name__),
    ) -> None:
        """Start the server process, without waiting until it has imported ``modules``.

        Args:
            environment: the environment of the programs that will run in forks.
            modules: names of the modules to import.
            log: file to which the server's output is appended.
            python: the Python interpreter of the server.
            program: arguments of ``python`` that run the server.
        """
        self.key = key_of(environment)
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(ANSWER_TIMEOUT_S)
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [python, *program, str(theirs.fileno()), *modules],
                env=self.key,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                cwd="/",
                start_new_session=True,
            )
        self.pid = self._process.pid

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Wait until the server has imported its modules; return False after a timeout.

        With the default ``timeout_s`` 0, do not wait.

        Raises:
            ForkRefusedError: an import failed, or the server cannot be forked safely; the message says why.
        """
        with self._lock:
            if self._problem is None:
                if not select.select([self._connection], [], [], timeout_s)[0]:
                    return False
                try:
                    self._problem = _ask(self._connection, b"")[0][1:].decode()
                except ForkRefusedError as error:
                    self._problem = str(error)
            if self._problem:
                raise ForkRefusedError(self._problem)
            return True

    def mismatch(self, environment: Mapping[str, str]) -> str:
        """Return why the server cannot fork a program with ``environment``; "" if it can."""
        names = differing(self.key, environment)
        return f"{', '.join(names)}: not as where it was imported ahead" if names else ""

    def spare(self, request: bytes) -> int:
        """Request an idle fork of the server; return the socket that accepts a program.

        ``request`` chooses the fork's parent: this process (``fork.CHILD``) or the server (``fork.ORPHAN``).

        Raises:
            ForkRefusedError: the server has ended or does not answer.
        """
        with self._lock:
            try:
                return _ask_for_spare(self._connection, request)
            except ForkRefusedError:
                self._process.kill()
                raise

    def start(self, program: Program, files: Sequence[int]) -> ForkedProcess:
        """Start a program in a fork of the server; the fork becomes this process's child.

        The arguments are those of ``start_program``.

        Raises:
            ForkRefusedError: the program cannot run in a fork, and the caller must start a new process.
        """
        with _adopting_orphans():
            spare = self.spare(fork.CHILD)
        return ForkedProcess(start_program(spare, program, files))

    def close(self) -> None:
        """End the server process; forks with running programs continue."""
        self._connection.close()
        try:
            self._process.wait(END_TIMEOUT_S if self._problem is not None else 0.01)
        except subprocess.TimeoutExpired:  # still importing, or stopped
            self._process.kill()
            self._process.wait()


class OwnForkServer:
    """This process's fork server, started at its first use. Thread-safe."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    def get(self, environment: Mapping[str, str], timeout_s: float) -> ForkServer | None:
        """Return a server that is ready to fork programs with ``environment``.

        The server is started if there is none for this environment; a server for another environment is closed. None if the
        server cannot start, if an import fails, or if the imports do not end within ``timeout_s``.
        """
        with self._lock:
            try:
                if self._server is None or self._server.mismatch(environment):
                    self._close()
                    self._server = ForkServer(environment, self._modules, log=Path(os.devnull))
                    atexit.register(self._server.close)
                return self._server if self._server.is_ready(timeout_s) else None
            except (OSError, ForkRefusedError) as error:
                logger.info("a new process does what a fork could: %s", error)
                self._close()
                return None

    def run(
        self, program: Program, files: Sequence[int], timeout_s: float
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        """Start a program in a fork of the server, or, if impossible, in a new process.

        A new process is started if ``get`` returns no server within ``timeout_s``, or if the fork refuses the program.
        ``files`` are the descriptors of the program's stdin, stdout and stderr. The program leads a new session. The kernel
        kills the program when this process ends.
        """
        program = dataclasses.replace(program, leads="session", ends_with_parent=True)
        server = self.get(program.environment, timeout_s)
        if server is not None:
            try:
                return server.start(program, files)
            except ForkRefusedError as reason:
                logger.info("%s starts as a new process, not as a fork: %s", program.words[1], reason)
        return new_process([sys.executable, *program.words], program.environment, program.directory, files)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def new_process(
    words: Sequence[str], environment: Mapping[str, str], directory: str, files: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a command in a new session; the kernel kills it when this process ends.

    ``words`` are the command with its arguments; ``files`` are the descriptors of the command's stdin, stdout and stderr.
    """
    return subprocess.Popen(
        words,
        stdin=files[0],
        stdout=files[1],
        stderr=files[2],
        env=environment,
        cwd=directory,
        start_new_session=True,
        preexec_fn=functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL),
    )


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    with _adopting:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0)
