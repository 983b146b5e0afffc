"""Spares: idle forks that become what a new Python process would be."""

# Checked before every start over thousands of files, where pathlib would take most of the time.
# ruff: noqa: PTH116, PTH208

from __future__ import annotations

import builtins
import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import itertools
import json
import multiprocessing.process
import os
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dstrial.fork_server import differing, import_places

MAX_FILES = 9  # open files that can be sent with a program
FAILED_TO_BEGIN = 70  # exit code of a spare that could not take on its program (EX_SOFTWARE of sysexits.h)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_IGNORED_WHILE_IDLE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Requests to a server or a spare: a spare that is a child of the asking process, or of the server.
CHILD, ORPHAN = b"c", b"o"
PID, PROGRAM = b"i", b"p"  # requests to a spare: its process id; to become a program

spare: int | None = None
"""The socket of this process's spare, if it is a fork that starts others."""
_exit_code = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A command line without the interpreter, and the process state that it starts in."""

    words: Sequence[str]  # ``-m MODULE ARGUMENTS`` or ``FILE ARGUMENTS``
    environment: Mapping[str, str]
    directory: str
    numbers: Sequence[int] = (0, 1, 2)  # descriptors of the open files that are sent along
    leads: str = ""  # ``session`` or ``group`` that the process leads; empty for neither
    umask: int | None = None  # None for that of its parent
    ends_with_parent: bool = False  # whether the kernel kills the process when its parent ends
    has_spare: bool = False  # whether its own children can be forks

    def import_directories(self) -> list[str]:
        """Return the directories whose modules come before installed ones."""
        found = ["" if self.words[0] == "-m" else os.path.dirname(self.words[0])]  # noqa: PTH120
        for word, following in itertools.pairwise((*self.words, "")):
            if word.startswith("--cont"):  # --context-dir, or short for it
                found.append(word.partition("=")[2] or following)
        return [str(Path(self.directory, place).resolve()) for place in found]


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The state of the server once it has imported everything."""

    added: Mapping[str, str]  # environment variables that its imports have set
    path: Sequence[str]  # ``sys.path`` without the program's directory and PYTHONPATH
    descriptors: frozenset[int]  # open files that its imports keep
    versions: Mapping[str, int]  # modification time (ns) of each imported file
    absent: frozenset[str]  # modules that its imports asked for and did not find

    def refusal(self, program: Program) -> str:
        """Return why a fork would differ from a new process; empty if it would not."""
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
                    if name not in sys.modules and name not in self.absent:
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
    """Return a file's modification time; 0 without one (torch's temporary file)."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def fork_spare(origin: Origin, *, is_adopted: bool = False) -> int:
    """Fork a spare; return the socket by which it is sent its program.

    ``is_adopted`` makes the spare a child of the nearest process above that adopts orphans.
    """
    ours, theirs = (one.detach() for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        child = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if child == 0:
        _be_spare(theirs, origin, is_adopted=is_adopted)
    os.close(theirs)
    if is_adopted:
        with contextlib.suppress(ChildProcessError):  # the server ignores SIGCHLD
            os.waitpid(child, 0)
    return ours


def _be_spare(descriptor: int, origin: Origin, *, is_adopted: bool) -> NoReturn:
    """Wait for a program, become it and end this process.

    The end unwinds the frames of the parent, too: none of them may hold an open file by more than its number.
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
    # Forks are made outside of these blocks: they end by unwinding, too.
    while (request := _receive(descriptor))[0] != PROGRAM:
        if request[0] == PID:
            os.write(descriptor, b"%d" % os.getpid())
        else:
            give_spare(descriptor, origin, is_adopted=True)
    with _ending_on_error():
        program, files = _read_program(request[1])
        refusal = origin.refusal(program)
        if refusal:
            reply(descriptor, refusal)
            os._exit(0)
        descriptor = _above(descriptor, program.numbers)
        _take_on(program, files, origin, descriptor)
    spare = fork_spare(origin) if program.has_spare else None
    with _ending_on_error():
        _reset_modules(program, origin)
        reply(descriptor, "")
        os.close(descriptor)
    _run(program.words)


def give_spare(descriptor: int, origin: Origin, *, is_adopted: bool) -> None:
    """Fork a spare and send its socket to the process that has asked for it."""
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
    """End this process on any error: a fork must not continue as its parent."""
    try:
        yield
    except BaseException:  # noqa: BLE001
        os._exit(FAILED_TO_BEGIN)


def reply(descriptor: int, problem: str) -> None:
    """Send the answer to a request, with the problem or an empty text."""
    os.write(descriptor, b"=" + problem.encode()[:4000])


def _receive(descriptor: int) -> tuple[bytes, list[int]]:
    """Return the next request and its open files."""
    with _ending_on_error():
        connection = socket.socket(fileno=descriptor)
        request, files, _, _ = socket.recv_fds(connection, 1, MAX_FILES + 1, socket.MSG_CMSG_CLOEXEC)
        connection.detach()
        if not request:
            os._exit(0)  # the parent has ended, or does not need this spare
        return request, files


def _read_program(files: list[int]) -> tuple[Program, list[int]]:
    with os.fdopen(files[0], encoding="utf-8") as text:
        text.seek(0)
        return Program(**json.load(text)), files[1:]


def _take_on(program: Program, files: Sequence[int], origin: Origin, descriptor: int) -> None:
    """Give this process the state in which a new process would start the program."""
    for number in _IGNORED_WHILE_IDLE:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _place(files, program.numbers)
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
    own_name = Path("/proc/self/comm")  # in ps and top; the command line stays the server's
    own_name.write_text(
        program.words[1].rpartition(".")[2] if program.words[0] == "-m" else Path(program.words[0]).name
    )
    os.chdir(program.directory)
    for standard, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        assert isinstance(stream, io.TextIOWrapper)
        _reset_stream(standard, stream)


def _reset_stream(number: int, stream: io.TextIOWrapper) -> None:
    """Open a standard stream anew as the same object, which log handlers keep.

    A stream asks its file once whether it is a terminal and can be sought in. Source: CPython 3.11 ``Python/pylifecycle.c``,
    ``create_stdio``.
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
    sys.path[:] = [own, *import_places(program.environment), *origin.path]
    importlib.invalidate_caches()
    sys.argv[:] = ["-m", *program.words[2:]] if program.words[0] == "-m" else list(program.words)
    sys.orig_argv[:] = [sys.executable, *program.words]
    if program.words[0] == "-m":
        name = program.words[1]
        # Of a package ``__main__`` is run; the package itself stays, with its modules as its attributes.
        is_package = hasattr(sys.modules.get(name), "__path__")
        sys.modules.pop(f"{name}.__main__" if is_package else name, None)
    tempfile.tempdir = None  # found anew, by TMPDIR
    # Random numbers differ between processes until a program sets a seed; ``random`` itself sees to it.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]  # where spawned processes begin
    multiprocessing.process.current_process().authkey = os.urandom(32)
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # reads the variables of this process
    if "determined.constants" in sys.modules:
        importlib.reload(sys.modules["determined.constants"])  # reads the ports of this process's allocation


def _run(words: Sequence[str]) -> NoReturn:
    """Run a program and end with its exit code."""
    global _exit_code
    try:
        exec(_load_main(words), vars(sys.modules["__main__"]))  # noqa: S102  # the program that was asked for
    except SystemExit as ended:
        if isinstance(ended.code, int):
            _exit_code = ended.code & 0xFF  # negative codes mean signals here
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


def _load_main(words: Sequence[str]) -> types.CodeType:
    """Make the module ``__main__`` and return its code."""
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # by both names, as multiprocessing has it
    if words[0] != "-m":
        vars(main)["__file__"] = str(Path.cwd() / words[0])
        return compile(Path(words[0]).read_bytes(), vars(main)["__file__"], "exec", dont_inherit=True)
    spec = importlib.util.find_spec(words[1])
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{words[1]}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        sys.exit(f"{sys.executable}: No module named {words[1]}")
    sys.argv[0] = str(spec.origin)
    vars(main).update(__spec__=spec, __file__=spec.origin, __loader__=spec.loader, __package__=spec.parent)
    code = spec.loader.get_code(spec.name)
    assert code is not None
    return code


def end_without_teardown() -> None:
    """End this process at once; the last exit handler.

    Taking apart a million objects that the process shares with others would copy them all, in 0.4 s.
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


def _above(descriptor: int, numbers: Iterable[int]) -> int:
    """Move an open file out of the way of these numbers."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1)
    os.close(descriptor)
    return moved


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    moved = [_above(file, numbers) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _close_all_but(kept: Iterable[int]) -> None:
    for descriptor in open_descriptors().difference(kept):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def open_descriptors() -> set[int]:
    """Return the open files but for the three standard ones."""
    names = os.listdir("/proc/self/fd")  # includes the descriptor of the listing itself, which is closed now
    return {int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}")} - {0, 1, 2}  # noqa: PTH110
