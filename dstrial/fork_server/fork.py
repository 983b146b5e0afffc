"""Spares: idle forks that run a program in the state of a new Python process."""

# Thousands of files are checked before every start; pathlib would take most of that time.
# ruff: noqa: PTH116, PTH208

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import importlib.machinery
import io
import itertools
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dstrial.fork_server import differing, pythonpath_of

MAX_FILES = 9  # maximum number of open files that are sent with a program
FAILED_TO_BEGIN = 70  # exit code of a spare that failed before its program (EX_SOFTWARE of sysexits.h)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_IGNORED_WHILE_IDLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Requests for a new spare: as a child of the requesting process (CHILD) or of the process that forks it (ORPHAN).
CHILD, ORPHAN = b"c", b"o"
PID, PROGRAM = b"i", b"p"  # requests to a spare: return your process id; run a program

spare: int | None = None
"""Socket of this process's spare; None unless this process is a fork whose program has ``has_spare``."""
_exit_code = 0  # of this fork's program; -n if signal n ends the program


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A Python program to run in a fork: its arguments and its initial process state."""

    words: Sequence[str]  # ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS``
    environment: Mapping[str, str]
    directory: str
    numbers: Sequence[int] = (0, 1, 2)  # descriptor numbers, in the program, of the files sent with it
    leads: str = ""  # ``session`` or ``group``: the process becomes its leader; empty for neither
    umask: int | None = None  # None to inherit the parent's
    ends_with_parent: bool = False  # whether the kernel kills the process when its parent ends
    has_spare: bool = False  # whether the process gets a spare to fork its own children from

    def import_directories(self) -> list[str]:
        """Return the absolute paths that the program puts first in ``sys.path``.

        These are the directory of the program, and the directory of an option ``--context-dir``.
        """
        found = ["" if self.words[0] == "-m" else os.path.dirname(self.words[0])]  # noqa: PTH120
        for word, following in itertools.pairwise((*self.words, "")):
            if word.startswith("--cont"):  # --context-dir, or short for it
                found.append(word.partition("=")[2] or following)
        return [str(Path(self.directory, place).resolve()) for place in found]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The state of a fork server after its imports; the forks inherit this state."""

    added: Mapping[str, str]  # environment variables that the imports set
    path: Sequence[str]  # ``sys.path`` without the program's directory and PYTHONPATH
    descriptors: frozenset[int]  # files that the imports opened
    versions: Mapping[str, int]  # modification time (ns) of each imported file

    def refusal(self, program: Program) -> str:
        """Return why ``program`` must not run in a fork; "" if it may.

        The reason is a difference to a new process: environment, open files, or files of imported modules.
        """
        names = differing(os.environ, {**self.added, **program.environment})
        if names:
            return f"{', '.join(names)}: not as where it was imported ahead"
        taken = sorted(self.descriptors.intersection(program.numbers))
        if taken:
            return f"what is imported keeps files {taken} open"
        changed = next(
            (file for file, known in self.versions.items() if _version(file) not in (known, 0)), ""
        )
        if changed:
            return f"{changed} has changed since it was imported"
        return self._shadowing(program.import_directories())

    def _shadowing(self, directories: Iterable[str]) -> str:
        importlib.invalidate_caches()
        for place in directories:
            with contextlib.suppress(OSError):
                for name in {entry.partition(".")[0] for entry in os.listdir(place)} - {"__main__"}:
                    if name not in sys.modules:
                        continue
                    found = importlib.machinery.PathFinder.find_spec(name, [place])
                    file = None if found is None else found.origin  # None for a directory without __init__.py
                    spec = getattr(sys.modules.get(name), "__spec__", None)
                    known = getattr(spec, "origin", None) or os.devnull
                    if file is not None and os.path.realpath(known) != os.path.realpath(file):
                        return f"{file} is named like {name}, which is imported ahead"
        return ""


def imported_versions() -> dict[str, int]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {file: _version(file) for file in files if isinstance(file, str)}


def _version(file: str) -> int:
    """Return a file's modification time in ns; 0 for a deleted one (torch has some)."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fork_spare(origin: Origin, *, is_adopted: bool = False) -> int:
    """Fork this process; return a socket to the idle fork, which waits for a program.

    ``origin`` is this process's state after its imports. If ``is_adopted``, the fork is orphaned: its parent becomes the
    nearest ancestor that is a child subreaper. Otherwise the fork is a child of this process.
    """
    ours, theirs = (one.detach() for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        child = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if child == 0:
        _run_spare(theirs, origin, is_adopted=is_adopted)
    os.close(theirs)
    if is_adopted:
        with contextlib.suppress(ChildProcessError):  # the server ignores SIGCHLD
            os.waitpid(child, 0)
    return ours


def _run_spare(descriptor: int, origin: Origin, *, is_adopted: bool) -> NoReturn:
    """Wait in an idle fork for a program from socket ``descriptor``; run it and exit.

    The exit also unwinds the stack frames inherited from the parent. Therefore these frames must own no file objects, only
    descriptors.
    """
    global spare
    with _ending_on_error():
        if is_adopted and os.fork():
            os._exit(0)
        for number in _IGNORED_WHILE_IDLE:
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        _close_all_but(origin.descriptors | {descriptor})
    # Fork outside of `_ending_on_error`: a fork unwinds the frames that it inherits.
    while (request := _receive(descriptor))[0] != PROGRAM:
        if request[0] == PID:
            os.write(descriptor, b"%d" % os.getpid())
        else:
            send_spare(descriptor, origin, is_adopted=True)
    with _ending_on_error():
        program, files = _read_program(request[1])
        refusal = origin.refusal(program)
        if refusal:
            reply(descriptor, refusal)
            os._exit(0)
        descriptor = _move_above(descriptor, program.numbers)
        _adopt_state(program, files, origin, descriptor)
    spare = fork_spare(origin) if program.has_spare else None
    with _ending_on_error():
        _reset_modules(program, origin)
        reply(descriptor, "")
        os.close(descriptor)
    _run(program.words)


def send_spare(descriptor: int, origin: Origin, *, is_adopted: bool) -> None:
    """Fork an idle process; send its socket, or an error, on socket ``descriptor``."""
    try:
        given = fork_spare(origin, is_adopted=is_adopted)
    except OSError as error:
        reply(descriptor, f"no process can be forked ({error.strerror})")
        return
    connection = socket.socket(fileno=descriptor)
    socket.send_fds(connection, [b"="], [given])
    connection.detach()
    os.close(given)


@contextlib.contextmanager
def _ending_on_error() -> Iterator[None]:
    """Exit on any error in the block, so that a fork never runs its parent's code."""
    try:
        yield
    except BaseException:  # noqa: BLE001
        os._exit(FAILED_TO_BEGIN)


def reply(descriptor: int, problem: str) -> None:
    """Send a response on socket ``descriptor``; ``problem`` is "" for success."""
    os.write(descriptor, b"=" + problem.encode()[:4000])


def _receive(descriptor: int) -> tuple[bytes, list[int]]:
    """Wait for a request; return (its kind, such as ``PROGRAM``, its descriptors).

    If the other process has ended or closed the socket, this process exits.
    """
    with _ending_on_error():
        connection = socket.socket(fileno=descriptor)
        request, files, _, _ = socket.recv_fds(connection, 1, MAX_FILES + 1, socket.MSG_CMSG_CLOEXEC)
        connection.detach()
        if not request:
            os._exit(0)  # the parent has ended, or has closed the socket
        return request, files


def _read_program(files: list[int]) -> tuple[Program, list[int]]:
    with os.fdopen(files[0], encoding="utf-8") as text:
        text.seek(0)
        return Program(**json.load(text)), files[1:]


def _adopt_state(program: Program, files: Sequence[int], origin: Origin, descriptor: int) -> None:
    """Set signals, open files, environment and directory of this fork for ``program``."""
    for number in _IGNORED_WHILE_IDLE:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _install_files(files, program.numbers)
    _close_all_but(origin.descriptors | {*program.numbers, descriptor})
    if program.leads == "session":
        os.setsid()
    elif program.leads == "group":
        os.setpgid(0, 0)
    if program.umask is not None:
        os.umask(program.umask)
    if program.ends_with_parent:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    environment = {**origin.added, **program.environment}
    os.environ.clear()
    os.environ.update(environment)
    own_name = Path("/proc/self/comm")  # shown by ps and top; the command line remains the server's
    own_name.write_text(
        program.words[1].rpartition(".")[2] if program.words[0] == "-m" else Path(program.words[0]).name
    )
    os.chdir(program.directory)
    for standard, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        assert isinstance(stream, io.TextIOWrapper)
        _reset_stream(standard, stream)


def _reset_stream(number: int, stream: io.TextIOWrapper) -> None:
    """Reinitialise a standard stream in place, because log handlers refer to it.

    A stream checks only at its creation whether its file is a terminal and seekable. Source: CPython 3.11
    ``Python/pylifecycle.c``, ``create_stdio``.
    """
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    mode = "r" if number == 0 else "w"
    file: Any = os.fdopen(number, f"{mode}b", 0 if is_unbuffered and number else -1, closefd=False)
    getattr(file, "raw", file).name = stream.name
    is_by_line = not is_unbuffered and (number == 2 or file.isatty())
    stream.__init__(file, stream.encoding, stream.errors, "\n", is_by_line, is_unbuffered)  # type: ignore[misc]
    stream.mode = mode  # type: ignore[misc]


def _reset_modules(program: Program, origin: Origin) -> None:
    own = str(Path.cwd()) if program.words[0] == "-m" else program.import_directories()[0]
    sys.path[:] = [own, *pythonpath_of(program.environment), *origin.path]
    importlib.invalidate_caches()
    sys.argv[:] = ["-m", *program.words[2:]] if program.words[0] == "-m" else list(program.words)
    sys.orig_argv[:] = [sys.executable, *program.words]
    if program.words[0] == "-m":
        name = program.words[1]
        # A package is run by its ``__main__``; the package stays imported, with its modules as attributes.
        is_package = hasattr(sys.modules.get(name), "__path__")
        sys.modules.pop(f"{name}.__main__" if is_package else name, None)
    tempfile.tempdir = None  # computed again, from TMPDIR
    # Random numbers differ between processes until the program sets a seed. ``random`` reseeds itself after a fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]  # directory of spawned processes
    multiprocessing.process.current_process().authkey = os.urandom(32)
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # reads the variables of this process
    if "determined.constants" in sys.modules:
        importlib.reload(sys.modules["determined.constants"])  # reads the ports of this process's allocation


def _run(words: Sequence[str]) -> NoReturn:
    global _exit_code
    try:
        _run_main(words)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            _exit_code = ended.code & 0xFF  # in `_exit_code` a negative number is a signal
        elif ended.code is not None:
            print(ended.code, file=sys.stderr)  # noqa: T201  # as Python does
            _exit_code = 1
    except BaseException as error:  # noqa: BLE001  # as Python does at its end
        shown = error.__traceback__
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        error.__traceback__ = shown
        sys.excepthook(type(error), error, shown)
        _exit_code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    sys.exit()


def _run_main(words: Sequence[str]) -> None:
    """Run a program, as Python would, in a new module ``__main__``.

    ``words`` are ``Program.words``.
    """
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # both names, as multiprocessing sets them
    if words[0] == "-m":
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` calls
        return
    vars(main)["__file__"] = str(Path.cwd() / words[0])
    code = compile(Path(words[0]).read_bytes(), vars(main)["__file__"], "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102  # the requested program


def end_without_teardown() -> None:
    """Flush all files and exit without deallocating objects; the last exit handler.

    Deallocation would copy the memory pages that are shared with the server, which takes 0.4 s.
    """
    # Text layers first: they flush into binary layers.
    for layer in (io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom)):
        for found in [sys.stdout, sys.stderr, *gc.get_objects()]:
            if issubclass(type(found), layer):
                with contextlib.suppress(Exception):
                    found.flush()
    if _exit_code < 0:
        signal.signal(-_exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_exit_code)
    os._exit(_exit_code & 0xFF)


def _move_above(descriptor: int, numbers: Iterable[int]) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)
    os.close(descriptor)
    return moved


def _install_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    moved = [_move_above(file, numbers) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _close_all_but(kept: Iterable[int]) -> None:
    for descriptor in open_descriptors().difference(kept):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def open_descriptors() -> set[int]:
    """Return this process's open file descriptors, except stdin, stdout and stderr."""
    names = os.listdir("/proc/self/fd")  # includes the descriptor of the listing itself, which is closed now
    return {int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")} - {0, 1, 2}  # noqa: PTH110
