"""Start programs as forks of a process that has imported torch and DeepSpeed.

A new process imports them for 2 to 3 s of CPU time, a fork for none. ``run`` and ``popen`` stand for those of
``subprocess``. The libraries of ``IMPORTED_AHEAD`` are there already; our own modules and Determined's are imported anew,
and variables, signals, the import path, open files and the working directory are those of a new process.

A launcher's ranks are forks, too: not of the launcher, which has threads and state of its own, but of a copy that was made
before it began. The launcher becomes their parent, as it is of new processes. A program whose variables change how Python or
torch start is a new process.

``TEST_FORKS=0`` has every program start as a new process. Not for tests of how processes are started or found: in /proc a
fork shows the command line and the variables of its origin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

IMPORTED_AHEAD = (
    "torch._dynamo",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.utils.tensorboard",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""What ranks and launchers import of libraries, sooner or later."""
SWITCH = "TEST_FORKS"
"""A variable: 0 has every program be a new process, as users have them."""
LAUNCHER = "dstrial.launch"
"""The program whose ranks are forks."""
RANK = "dstrial.launch.rank_main"
# Python and the libraries read these when they start: a program with others is a new process.
_READ_AT_START = ("PYTHON", "LD_", "DS_ACCELERATOR", "OMP_NUM_THREADS", "TORCHDYNAMO_", "TORCH_LOGS")
_READ_LATER = ("PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
_VARIABLES = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_server: tuple[socket.socket, dict[str, str]] | None = None
_lock = threading.Lock()


def run(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | os.PathLike[str],
    timeout: float,
    is_merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m ARGUMENTS`` to its end, with its output captured; ``is_merged`` has all of it in ``stdout``.

    Raises:
        subprocess.TimeoutExpired: it was killed after ``timeout`` seconds.
    """
    command = [sys.executable, "-m", *arguments]
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        program = popen(command, env=env, cwd=cwd, stdout=stdout, stderr=stdout if is_merged else stderr)
        try:
            returncode = program.wait(timeout)
        except subprocess.TimeoutExpired:
            program.send_signal(signal.SIGKILL)
            program.wait(timeout)
            raise
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode().replace("\r\n", "\n"))
    return subprocess.CompletedProcess(command, returncode, *texts)


def popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    cwd: str | os.PathLike[str] | None = None,
    start_new_session: bool = False,
) -> Program | subprocess.Popen[bytes]:
    """Start a command, as ``subprocess.Popen`` does: ``[sys.executable, "-m", MODULE or FILE, ...]`` as a fork."""
    has_forks = command[0] == sys.executable and os.environ.get(SWITCH) != "0"
    server, start = _running_server() if has_forks else (None, {})
    if server is None or not _starts_as(env, start):
        return subprocess.Popen(
            command, env=env, cwd=cwd, stdout=stdout, stderr=stderr, start_new_session=start_new_session
        )
    sys.audit("subprocess.Popen", command[0], command, cwd, env)  # for the rules of tests without a marker
    answers, theirs = socket.socketpair()
    with theirs, Path(os.devnull).open("rb") as stdin, _lock:
        files = [file.fileno() for file in (stdin, stdout, stderr, theirs)]
        _send(server, [list(command[1:]), dict(env), str(cwd or Path.cwd()), start_new_session], files)
    return Program(command, answers)


class Program:
    """A program that is a fork, with what ``subprocess.Popen`` has of it.

    Args:
        command: what was asked for.
        answers: tells its process, and later its exit code.
    """

    def __init__(self, command: Sequence[str], answers: socket.socket) -> None:
        self.args = command
        self.returncode: int | None = None
        self._answers = answers
        (self.pid,) = struct.unpack("i", answers.recv(4))

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended: its exit code, or less than 0 for a signal."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            (self.returncode,) = struct.unpack("i", self._answers.recv(4))
            self._answers.close()
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        """Return how it ended, or None."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _running_server() -> tuple[socket.socket, dict[str, str]]:
    """Return where to ask for programs, and the variables with which their libraries were imported."""
    global _server
    if _server is None:
        ours, theirs = socket.socketpair()
        start = {**os.environ, **_VARIABLES}
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env=start,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        _server = ours, start
    return _server


def _send(connection: socket.socket, request: list[Any], files: list[int]) -> None:
    text = json.dumps(request).encode()
    socket.send_fds(connection, [struct.pack("i", len(text))], files)
    connection.sendall(text)


def _receive(connection: socket.socket) -> tuple[list[Any], list[int]] | None:
    """Return a request and its files; None when nobody can ask any more."""
    head, files, *_ = socket.recv_fds(connection, 4, 8)
    if not head:
        return None
    (left,) = struct.unpack("i", head)
    text = b""
    while len(text) < left:
        text += connection.recv(left - len(text))
    return json.loads(text), files


def _starts_as(env: Mapping[str, str], other: Mapping[str, str]) -> bool:
    def at_start(variables: Mapping[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in variables.items()
            if name.startswith(_READ_AT_START) and name not in _READ_LATER
        }

    return at_start(env) == at_start(other)


def _serve(connection: socket.socket, start: Mapping[str, str], path: list[str]) -> None:
    """Begin what is asked for, each in a process that waits for it and tells how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those who wait for programs are not waited for
    while request := _receive(connection):
        (arguments, env, cwd, is_leader), files = request
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            asked = socket.socket(fileno=files.pop())
            pid = os.fork()
            if pid == 0:
                asked.close()
                _become(arguments, env, cwd, files, start, path, is_leader=is_leader)
            with contextlib.suppress(OSError):
                asked.sendall(struct.pack("i", pid))
                status = os.waitpid(pid, 0)[1]
                asked.sendall(struct.pack("i", os.waitstatus_to_exitcode(status)))
            os._exit(0)
        for file in files:
            os.close(file)


def _become(
    arguments: list[str],
    env: dict[str, str],
    cwd: str,
    files: list[int],
    start: Mapping[str, str],
    path: list[str],
    *,
    is_leader: bool,
) -> NoReturn:
    """Go on as Python with these arguments would, in this process, and end it."""
    try:
        for of_signal in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(of_signal, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in enumerate(files):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        if is_leader:
            os.setsid()
        if arguments[:2] == ["-m", LAUNCHER]:
            _fork_its_ranks(start, path)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        searched = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
        own = Path.cwd() if arguments[0] == "-m" else Path(arguments[0]).resolve().parent
        sys.path[:] = [str(own), *searched, *path]
        sys.path_importer_cache.clear()
        sys.argv[:] = arguments[arguments[0] == "-m" :]
        sys.orig_argv[:] = [sys.executable, *arguments]
        if env.get("PYTHONFAULTHANDLER"):
            faulthandler.enable()
        tempfile.tempdir = None  # found out anew, by TMPDIR
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # every process has its own
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ImportError):
            importlib.import_module("sitecustomize")
    except BaseException:  # noqa: BLE001 (whatever it is, this process must not go on as its parent)
        traceback.print_exc()
        os._exit(70)
    code = _exit_code_of(arguments)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _exit_code_of(arguments: list[str]) -> int:
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 (as Python does at its end)
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _fork_its_ranks(start: Mapping[str, str], path: list[str]) -> None:
    """Keep a copy of this process as it is, and start its ranks as forks of the copy."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        _serve_program(theirs, start, path)
    theirs.close()
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    names = inspect.signature(usual)

    def _execute_child(self: subprocess.Popen[Any], *given: Any) -> None:
        asked = names.bind(self, *given).arguments
        command, env, pipes = asked["args"], asked["env"], ("p2cread", "c2pwrite", "errwrite")
        variables = dict(os.environ if env is None else env)
        if not (
            _is_rank(command)
            and _starts_as(variables, start)
            and not asked["pass_fds"]
            and not asked["preexec_fn"]
        ):
            usual(self, *given)
            return
        files = [asked[name] if asked[name] != -1 else number for number, name in enumerate(pipes)]
        request = [
            list(command[1:]),
            variables,
            os.fspath(asked["cwd"] or Path.cwd()),
            asked["start_new_session"],
        ]
        libc = ctypes.CDLL(None)
        with _lock:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _send(ours, [*request, os.getpid()], files)
            (self.pid,) = struct.unpack("i", ours.recv(4))
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._child_created = True  # type: ignore[attr-defined]
        self._close_pipe_fds(  # type: ignore[attr-defined]
            *(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )

    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def _is_rank(command: Any) -> bool:
    return (
        isinstance(command, (list, tuple))
        and len(command) > 2
        and tuple(command[:2]) == (sys.executable, "-m")
        and command[2] == RANK
        and all(isinstance(word, str) for word in command)
    )


def _serve_program(connection: socket.socket, start: Mapping[str, str], path: list[str]) -> NoReturn:
    """Start what the program that we are a copy of asks for, as its children, until it has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the program's end is ours
    while request := _receive(connection):
        (arguments, env, cwd, is_leader, parent), files = request
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                connection.close()
                while os.getppid() != parent:
                    pass  # until the process between has ended, a moment
                _become(arguments, env, cwd, files, start, path, is_leader=is_leader)
            os.write(tell, struct.pack("i", pid))
            os._exit(0)
        os.waitpid(between, 0)  # its child is now that of the program
        connection.sendall(os.read(told, 4))
        for file in (*files, told, tell):
            os.close(file)
    os._exit(0)


def main() -> None:
    """Import what programs need, and begin them for the process that has started this one."""
    start = dict(os.environ)  # libraries add to them
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [place for place in sys.path[1:] if place not in places]
    for name in IMPORTED_AHEAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no program's collections look through all the libraries
    _serve(socket.socket(fileno=int(sys.argv[1])), start, path)


if __name__ == "__main__":
    main()
