# What is asked before every fork of hundreds of files, without the way through pathlib.
# ruff: noqa: PTH116, PTH123, PTH208
"""Makes a fork be what a new process with the same command line would be."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import faulthandler
import fcntl
import gc
import importlib
import importlib.machinery
import io
import itertools
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dstrial.fork_server.key import import_places

FAILED_TO_BEGIN = 70
"""Exit code of a fork that could not be made like a new process (EX_SOFTWARE of sysexits.h)."""

_DEFAULTS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What a fork is to run; ``words`` are those behind the interpreter.

    ``kept_files`` are open files that it has under the same numbers as the process that asks for it.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]
    directory: str
    leads_session: bool = False
    leads_group: bool = False
    kept_files: tuple[int, ...] = ()

    @property
    def places(self) -> list[str]:
        """Directories whose modules it finds before those that are installed."""
        own = "" if self.words[0] == "-m" else Path(self.words[0]).parent
        places = [own]
        for word, following in itertools.pairwise((*self.words, "")):
            # The directory of a model definition, as our launcher and its ranks are told it; flags may be shortened.
            if word.startswith("--cont"):
                places.append(word.partition("=")[2] or following)
        return [str(Path(self.directory, place).resolve()) for place in places]

    def to_json(self) -> dict[str, Any]:
        """Return what ``from_json`` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Program:
        """Read what ``to_json`` returned."""
        return cls(**{**fields, "words": tuple(fields["words"]), "kept_files": tuple(fields["kept_files"])})


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What a process was like when it had imported everything, and before it forked.

    Attributes:
        environment: that it was started with.
        added: variables that its imports have set.
        path: ``sys.path`` but for the place of the program and PYTHONPATH.
        handlers: of signals, by number.
        descriptors: open files that its imports keep.
        foreign: open files by which it is asked.
        sources: for each file of a module, when it was changed (ns since 1970), and its bytes.
        absent: modules that its imports asked for and did not find.
        copied: modules whose programs have a copy of what they were before they began, for forks of their own.
        words_at: address and bytes of the memory that /proc/PID/cmdline shows; None if unknown.
    """

    environment: Mapping[str, str]
    added: Mapping[str, str]
    path: tuple[str, ...]
    handlers: Mapping[int, Any]
    descriptors: frozenset[int]
    foreign: frozenset[int]
    sources: Mapping[str, tuple[int, int]]
    absent: frozenset[str]
    copied: frozenset[str]
    words_at: tuple[int, int] | None

    @classmethod
    def here(
        cls,
        environment: Mapping[str, str],
        path: Sequence[str],
        foreign: Iterable[int],
        copied: Iterable[str] = (),
        absent: Iterable[str] = (),
    ) -> Origin:
        """Describe this process; ``foreign`` are the open files that are not its imports'."""
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
        added = {name: value for name, value in os.environ.items() if environment.get(name) != value}
        numbers = sorted(signal.valid_signals())
        return cls(
            environment=dict(environment),
            added=added,
            path=tuple(path),
            handlers={int(number): signal.getsignal(number) for number in numbers},
            descriptors=frozenset(_open_descriptors()).difference(foreign),
            foreign=frozenset(foreign),
            sources=_sources(),
            absent=frozenset(absent),
            copied=frozenset(copied),
            words_at=_shown_memory(),
        )

    def why_not_keep(self, files: Iterable[int]) -> str:
        """Return what keeps a fork from having files of these numbers; empty if nothing."""
        taken = sorted(self.descriptors.intersection(files))
        return f"what is imported keeps files {taken} open" if taken else ""

    def why_not_import(self, places: Iterable[str]) -> str:
        """Return a module that these directories shadow; empty if there is none."""
        for place in places:
            sys.path_importer_cache.pop(place, None)
            with contextlib.suppress(OSError):
                for name in {entry.partition(".")[0] for entry in os.listdir(place)} - {"__main__"}:
                    if name not in sys.modules and name not in self.absent:
                        continue
                    found = importlib.machinery.PathFinder.find_spec(name, [place])
                    file = None if found is None else found.origin  # none for a directory without __init__.py
                    known = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
                    if file is not None and (
                        known is None or os.path.realpath(known) != os.path.realpath(file)
                    ):
                        return f"{file} is named like {name}, which is imported ahead"
        return ""

    def why_not_fork(self) -> str:
        """Return what makes its forks unlike new processes; empty if nothing does.

        A thread holds locks that nobody releases in a fork, an accelerator's context does not survive one, and of what has
        changed on the disk since it was imported a new process would have the new version.
        """
        num_threads = len(os.listdir("/proc/self/task"))
        if num_threads != 1:
            return f"it has {num_threads} threads"
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and (cuda.is_initialized() or (cuda._is_in_bad_fork() and _may_have_devices())):
            return "it has used an accelerator"
        for file, known in self.sources.items():
            if _version_of(file) not in (known, None):  # torch 2.6 imports a module that a fork's end deletes
                return f"{file} has changed since it was imported"
        return ""


def _may_have_devices() -> bool:
    """Say whether torch could find a device in any environment.

    Without a driver, and so without NVML, torch asks CUDA how many devices there are whenever determined or DeepSpeed is
    imported, and then takes all forks for spoilt (seen with torch 2.13 for CUDA 13); there is nothing that was spoilt.
    """
    if not getattr(sys.modules["torch"].version, "cuda", None):
        return True  # ROCm, which brings its libraries along
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def become(
    program: Program, origin: Origin, files: Sequence[int], *, prepare: Callable[[], None] = lambda: None
) -> NoReturn:
    """Go on as Python with this command line would, in this process, and end it."""
    try:
        _reset_signals(origin)
        _place(files, (0, 1, 2, *program.kept_files))
        close_all_but(origin.descriptors.union(program.kept_files))
        if program.leads_group:
            os.setpgid(0, 0)
        elif program.leads_session:
            os.setsid()
        prepare()
        show(origin, [sys.executable, *program.words])
        environment = {**origin.added, **program.environment}
        os.environ.clear()
        os.environ.update(environment)
        _reset_streams()
        os.chdir(program.directory)
        _reset_modules(program, origin)
    except BaseException:  # noqa: BLE001  # whatever it is, this process must not go on as its parent
        traceback.print_exc()
        os._exit(FAILED_TO_BEGIN)
    end(_run(program.words))


def run_call(function: Callable[[], Any], origin: Origin, files: Sequence[int]) -> NoReturn:
    """Call a function that may fork programs itself, and end this process.

    It keeps what was imported as it is: whatever is forked from it begins where this process does.
    """
    try:
        _reset_signals(origin)
        for number, file in enumerate(files):
            os.dup2(file, number)
        close_all_but(origin.descriptors)
        function()
    except BaseException:  # noqa: BLE001  # as above
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def show(origin: Origin, words: Sequence[str]) -> None:
    """Have /proc/PID/cmdline show a command line.

    It shows memory of the first program of a process (proc(5)).
    """
    if origin.words_at is not None:
        _write(origin.words_at, b"\0".join(word.encode(errors="replace") for word in words))


def end(code: int) -> NoReturn:
    """End this process as Python would, but for taking apart what it was forked with.

    Threads are waited for, exit handlers run, open files are flushed. Taking apart a million objects that the process shares
    with others would copy them all.
    """
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    # The layer above first: what it holds goes to the one below.
    for layer in (io.TextIOWrapper, (io.BufferedWriter, io.BufferedRandom)):
        for found in gc.get_objects():
            if issubclass(type(found), layer):
                with contextlib.suppress(Exception):
                    found.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)


def _run(words: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    try:
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what the interpreter itself calls
        else:
            path = Path.cwd() / words[0]
            # It has future statements of its own only.
            code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            vars(sys.modules["__main__"])["__file__"] = str(path)
            exec(code, vars(sys.modules["__main__"]))  # noqa: S102  # the program that we were asked to run
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        with contextlib.suppress(Exception):
            print(ended.code, file=sys.stderr)  # noqa: T201  # as Python does
        return 1
    except KeyboardInterrupt as error:
        _tell(error)
        sys.stderr.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001  # as Python does at its end
        _tell(error)
        return 1
    return 0


def _tell(error: BaseException) -> None:
    """Have an error told as Python does, without the calls of this file."""
    own = error.__traceback__
    error.__traceback__ = None if own is None else own.tb_next
    sys.excepthook(type(error), error, error.__traceback__)


def _reset_signals(origin: Origin) -> None:
    signal.set_wakeup_fd(-1)
    for number, handler in origin.handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    for number in _DEFAULTS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reset_streams() -> None:
    """Make the standard streams anew, for the files that they are of now.

    Who has one of them keeps it. A stream asks its file once whether it is a terminal and can be sought in.

    Source: CPython 3.11 ``Python/pylifecycle.c``, ``create_stdio``.
    """
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if not isinstance(stream, io.TextIOWrapper):
            continue
        mode = "r" if number == 0 else "w"
        file: Any = open(number, f"{mode}b", 0 if is_unbuffered and number else -1, closefd=False)  # noqa: SIM115
        getattr(file, "raw", file).name = stream.name
        stream.__init__(  # type: ignore[misc]  # the same object, as handlers of logs have it
            file,
            stream.encoding,
            stream.errors,
            "\n",
            line_buffering=not is_unbuffered and (number == 2 or file.isatty()),
            write_through=is_unbuffered,
        )
        stream.mode = mode  # type: ignore[misc]


def _reset_modules(program: Program, origin: Origin) -> None:
    """Give modules the state that they would have in a new process."""
    own = str(Path.cwd()) if program.words[0] == "-m" else str(Path(program.words[0]).resolve().parent)
    sys.path[:] = [own, *import_places(program.environment), *origin.path]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    # runpy puts the file of the module into the place of "-m".
    sys.argv[:] = ["-m", *program.words[2:]] if program.words[0] == "-m" else list(program.words)
    sys.orig_argv[:] = [sys.executable, *program.words]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # as multiprocessing has it
        sys.modules["__mp_main__"] = main
    if program.words[0] == "-m":
        name = program.words[1]
        # Of a package runpy runs ``__main__``; the package itself stays, with its modules as its attributes.
        is_package = hasattr(sys.modules.get(name), "__path__")
        sys.modules.pop(f"{name}.__main__" if is_package else name, None)
    tempfile.tempdir = None  # found out anew, by TMPDIR
    tempfile._name_sequence = None  # type: ignore[attr-defined]
    # Every process draws from a seed of its own until it sets one.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        # Its generator of the CPU (ATen/CPUGeneratorImpl.cpp, getDefaultCPUGenerator); those of accelerators are made with their
        # context, which no process has that is forked.
        sys.modules["torch"].default_generator.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        # From where a spawned process finds the script of this one.
        process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
        current = process.current_process()
        current.authkey = os.urandom(32)
        current._config.pop("tempdir", None)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ImportError):
        # It reads the variables of this process.
        importlib.import_module("sitecustomize")
    if "determined.constants" in sys.modules:
        # It reads the ports of this process's allocation.
        importlib.reload(sys.modules["determined.constants"])


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give open files their numbers, for the program to inherit."""
    above = max(numbers) + 1  # out of the way of each other
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def close_all_but(kept: Iterable[int]) -> None:
    """Close every open file that is neither kept nor one of the three standard ones."""
    for descriptor in _open_descriptors() - {*kept, 0, 1, 2}:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _open_descriptors() -> set[int]:
    # The one that reads the directory is closed when it is read.
    return {number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)}


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _sources() -> dict[str, tuple[int, int]]:
    found = {}
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        file = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else None
        version = _version_of(file) if isinstance(file, str) else None
        if version is not None and isinstance(file, str):
            found[file] = version
    return found


def _version_of(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _shown_memory() -> tuple[int, int] | None:
    """Return the address and the bytes of what /proc shows as the command line."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        # proc(5): arg_start and arg_end are the fields 48 and 49; the state is the third.
        begin, end = (int(field) for field in fields[45:47])
    except (OSError, ValueError):
        return None
    return (begin, end - begin) if end > begin else None


def _write(place: tuple[int, int], data: bytes) -> None:
    """Replace what is in memory; the last byte stays 0."""
    address, size = place
    ctypes.memmove(address, data[: size - 1].ljust(size, b"\0"), size)
