"""Start programs as forks of a process that has imported torch and DeepSpeed.

A new process imports them for 2 to 3 s of CPU time, a fork for none. ``run`` and ``Popen`` stand for those of
``subprocess``. The libraries of ``IMPORTED_AHEAD`` are there already; our own modules and Determined's are imported anew,
and variables, signals, the import path, open files and the working directory are those of a new process.

Who asks for a program becomes its parent, as of a new process. A launcher's ranks are forks, too: not of the launcher, which
has threads and state of its own, but of a copy that was made before it began. A program whose variables change how Python or
torch start is a new process.

``TEST_FORKS=0`` has every program start as a new process. Not for tests of how processes are started or found: in /proc a
fork shows the command line and the variables of its origin.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
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
from typing import Any, NoReturn

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
_lock = threading.Lock()
servers: set[int] = set()
"""The process that is forked, once there is one; it ends with this process."""


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` whose ``[sys.executable, "-m" MODULE or FILE, ...]`` is a fork."""

    def _execute_child(self, *given: Any) -> None:
        command: Any = self.args
        has_forks = command[0] == sys.executable and os.environ.get(SWITCH) != "0"
        if not has_forks or not _fork(self, *_server(), given):
            super()._execute_child(*given)  # type: ignore[misc]


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
    stderr = subprocess.STDOUT if is_merged else subprocess.PIPE
    with Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=stderr, text=True) as program:
        try:
            texts = program.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    return subprocess.CompletedProcess(command, program.returncode, *texts)


@functools.cache
def _server() -> tuple[socket.socket, dict[str, str]]:
    """Return where to ask for programs, and the variables with which their libraries were imported."""
    ours, theirs = socket.socketpair()
    start = {**os.environ, **_VARIABLES}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=start,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    servers.add(server.pid)
    return ours, start


def _fork(
    process: subprocess.Popen[Any], server: socket.socket, start: Mapping[str, str], given: Sequence[Any]
) -> bool:
    """Do what ``Popen._execute_child`` does, by a fork of the server; False where only a new process will do."""
    asked = inspect.signature(subprocess.Popen._execute_child).bind(process, *given).arguments  # type: ignore[attr-defined]
    variables = dict(os.environ if asked["env"] is None else asked["env"])
    if asked["pass_fds"] or asked["preexec_fn"] or not _starts_as(variables, start):
        return False
    sys.audit("subprocess.Popen", asked["args"][0], asked["args"], asked["cwd"], asked["env"])
    pipes = (asked["p2cread"], asked["c2pwrite"], asked["errwrite"])
    request = [
        list(map(os.fspath, asked["args"][1:])),
        variables,
        os.fspath(asked["cwd"] or Path.cwd()),
        asked["start_new_session"],
        os.getpid(),
    ]
    libc = ctypes.CDLL(None)
    with _lock:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _send(server, request, [idx if file == -1 else file for idx, file in enumerate(pipes)])
        (process.pid,) = struct.unpack("i", server.recv(4))
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    process._child_created = True  # type: ignore[attr-defined]
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    process._close_pipe_fds(*(asked[name] for name in ends))  # type: ignore[attr-defined]
    return True


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


def _serve(connection: socket.socket, start: Mapping[str, str], path: list[str]) -> NoReturn:
    """Start what a process asks for as its children, until it has ended."""
    for of_signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(of_signal, signal.SIG_IGN)  # its end is ours
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
        os.waitpid(between, 0)  # its child is now that of who asked
        connection.sendall(os.read(told, 4))
        for file in (*files, told, tell):
            os.close(file)
    os._exit(0)


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
        _serve(theirs, start, path)
    theirs.close()
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    @functools.wraps(usual)
    def _execute_child(self: subprocess.Popen[Any], *given: Any) -> None:
        command: Any = self.args  # a list here
        is_rank = not isinstance(command, (str, bytes)) and tuple(command[:3]) == (sys.executable, "-m", RANK)
        if not is_rank or not _fork(self, ours, start, given):
            usual(self, *given)

    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def main() -> None:
    """Import what programs need, and begin them for the process that has started this one."""
    start = dict(os.environ)  # libraries add to them
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [place for place in sys.path[1:] if place not in places]
    for name in IMPORTED_AHEAD:
        with contextlib.suppress(
            ModuleNotFoundError
        ):  # another release has it elsewhere, and imports it later
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no program's collections look through all the libraries
    _serve(socket.socket(fileno=int(sys.argv[1])), start, path)


if __name__ == "__main__":
    main()
