"""The process that is forked: imports, and then does nothing but fork.

    python -m dstrial.fork_server.server OPTIONS

It has one thread, runs no tensor operation, and ends when nobody can ask it any more: it holds the other end of a pair of sockets
of who has started it, which the kernel closes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from dstrial import collector
from dstrial.fork_server import client
from dstrial.fork_server.fork import (
    Origin,
    Program,
    become,
    close_all_but,
    run_call,
    show,
)
from dstrial.fork_server.key import NVML_CHECK_VARIABLE, import_places
from dstrial.fork_server.messages import receive, send

_PID = struct.Struct("i")
_REAPS_EVERY_S = 1.0
_BEGINS_WITHIN_S = 5.0


def main(words: Sequence[str]) -> None:
    """Import what is asked for, and serve."""
    options = json.loads(words[0])
    connection = socket.socket(fileno=options["descriptor"])
    connection.set_inheritable(False)
    foreign = {number for number in (options["descriptor"], options["listener"]) if number is not None}
    # DeepSpeed sets it when it is imported; here it is set before.
    environment = {name: value for name, value in os.environ.items() if name != NVML_CHECK_VARIABLE}
    places = set(
        map(os.path.abspath, import_places(environment))
    )  # site.py leaves duplicates out of sys.path
    path = [place for place in sys.path[1:] if place not in places]
    with collector.paused_for_good():
        failures, absent = _import(options["imports"])
    origin = Origin.here(environment, path, foreign, options["copied"], absent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # its end is the end of who has started it
    show(origin, [sys.executable, "-m", "dstrial.fork_server.server", "(imported ahead)"])
    why_not = origin.why_not_fork()
    if why_not:
        failures[""] = why_not
    send(connection, {"ready": not failures, "failures": failures})
    listener = None
    if options["listener"] is not None:
        listener = socket.socket(fileno=options["listener"])
        listener.set_inheritable(False)
    serve(connection, origin, listener, options["free"])


def serve(
    owner: socket.socket,
    origin: Origin,
    listener: socket.socket | None = None,
    free: Sequence[str] = (),
) -> NoReturn:
    """Do what is asked, until ``owner`` can ask no more.

    Others of the same account may ask at ``listener``.
    """
    asking = [owner]
    while True:
        awaited = [*asking, *([listener] if listener is not None else [])]
        readable, _, _ = select.select(awaited, [], [], _REAPS_EVERY_S)
        _reap()
        for connection in readable:
            if connection is listener:
                asking += _accepted(listener, origin, free)
                continue
            if _answer(connection, origin):
                continue
            if connection is owner:
                os._exit(0)
            asking.remove(connection)
            connection.close()


def _accepted(listener: socket.socket, origin: Origin, free: Sequence[str]) -> list[socket.socket]:
    """Take in who asks, and say what it is that can be forked."""
    try:
        connection, _ = listener.accept()
        connection.settimeout(client.ANSWER_TIMEOUT_S)
        like = {"environment": dict(origin.environment), "added": dict(origin.added), "free": free}
        send(connection, {"ready": True, "failures": {}, **like})
    except OSError:
        return []
    return [connection]


def _answer(connection: socket.socket, origin: Origin) -> bool:
    """Do what somebody asks, and say whether there was anybody."""
    try:
        received = receive(connection)
    except OSError:
        received = None
    if received is None:
        return False
    message, files = received
    try:
        answer = _fork(message, files, origin)
    except Exception:  # noqa: BLE001  # whatever is wrong with one request, the next one is another
        answer = {"refused": traceback.format_exc()}
    finally:
        for file in files:
            os.close(file)
    with contextlib.suppress(OSError):
        send(connection, answer)
    return True


def _import(names: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Import modules; return failures by name, and the modules that were not found."""
    failures = {}
    last = _LastFinder()
    sys.meta_path.append(last)
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  # a process that needs it says what is wrong
            failures[name] = f"{type(error).__name__}: {error}"
    sys.meta_path.remove(last)
    return failures, last.absent


class _LastFinder:
    """Notes the modules that no other finder has found."""

    def __init__(self) -> None:
        self.absent: set[str] = set()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        del target
        if path is None:
            self.absent.add(name)


def _fork(message: dict[str, Any], files: Sequence[int], origin: Origin) -> dict[str, Any]:
    """Fork a process that begins when it is told to; answer with its pid."""
    program = message["program"]
    kept_files = program["kept_files"] if program else ()
    why_not = (
        origin.why_not_fork() or origin.why_not_keep(kept_files) or origin.why_not_import(message["places"])
    )
    if why_not:
        return {"refused": why_not}
    *standard, go = files
    told, tell = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            try:
                # With the end of a process in between, the fork becomes a child of who asks: the nearest that adopts orphans.
                if message["is_adopted"] and os.fork():
                    os._exit(0)
                _begin(message, standard, go, tell, origin)
            finally:
                os._exit(1)  # it must not go on as its parent
        if message["is_adopted"]:
            os.waitpid(child, 0)
    except OSError:
        os.close(told)
        raise
    finally:
        os.close(tell)
    try:
        # It says its pid when /proc shows what it is. Not to the end of the pipe: it has the other end for longer.
        data = os.read(told, _PID.size) if _is_readable(told) else b""
    finally:
        os.close(told)
    return {"pid": _PID.unpack(data)[0]} if data else {"refused": "the fork ended before it began"}


def _is_readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], _BEGINS_WITHIN_S)[0])


def _begin(message: dict[str, Any], standard: Sequence[int], go: int, tell: int, origin: Origin) -> NoReturn:
    """Be the fork: wait until it is known, and become what was asked for."""
    try:
        show(origin, [sys.executable, *message["title"]])
        os.write(tell, _PID.pack(os.getpid()))
        # Nobody knows of this process if who asks is gone.
        if os.read(go, 1) != b"g":
            os._exit(0)
    except BaseException:  # noqa: BLE001  # it must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    if message["call"] is not None:
        os.setsid()
        call = message["call"]
        forks = Forks(origin)
        run_call(lambda: _function(call["file"], call["name"])(*call["arguments"], forks), origin, standard)
    program = Program.from_json(message["program"])
    become_program(program, origin, standard)


def become_program(
    program: Program, origin: Origin, files: Sequence[int], prepare: Callable[[], None] = lambda: None
) -> NoReturn:
    """Be a program; what it starts can be forks of what this process is now."""
    connection, copy = None, None
    # Some are named behind the module that starts them, as those of ranks are.
    if program.words[0] == "-m" and not origin.copied.isdisjoint(program.words):
        ours, theirs = socket.socketpair()
        # First, so that the copy is in the process group of the program, as what this starts itself.
        prepare()
        prepare = _nothing
        copy = os.fork()
        if copy == 0:
            _serve_program(theirs, origin)
        theirs.close()
        connection = _above(ours, program.kept_files)

    def keep() -> None:
        prepare()
        client.of_this_process = (
            None
            if connection is None
            else client.Connection(
                connection, {**origin.added, **program.environment}, origin.added, child=copy
            )
        )

    kept = origin if connection is None else _keeping(origin, connection.fileno())
    become(program, kept, files, prepare=keep)


class Forks:
    """What a call may fork: programs, with its own files and process groups."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    def start(
        self,
        words: Sequence[str],
        *,
        environment: dict[str, str],
        directory: str,
        files: Sequence[int],
        prepare: Callable[[], None],
    ) -> int:
        """Start ``python WORDS`` as a child of this process; return its pid."""
        program = Program(tuple(words), environment, directory)
        pid = os.fork()
        if pid == 0:
            try:
                become_program(program, self._origin, files, prepare)
            finally:
                os._exit(1)
        return pid


def _above(connection: socket.socket, numbers: Sequence[int]) -> socket.socket:
    """Return a connection whose file has none of these numbers."""
    if connection.fileno() not in numbers:
        return connection
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1))


def _serve_program(theirs: socket.socket, origin: Origin) -> NoReturn:
    """Be the copy of a program from which what that starts is forked."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(ignored, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        # Above all the program's output: it ends with the program.
        close_all_but(origin.descriptors | {theirs.fileno()})
        show(origin, [sys.executable, "-m", "dstrial.fork_server.server", "(ranks)"])
        serve(theirs, origin)
    finally:
        os._exit(1)


def _keeping(origin: Origin, descriptor: int) -> Origin:
    return dataclasses.replace(origin, descriptors=origin.descriptors | {descriptor})


def _function(file: str, name: str) -> Callable[..., Any]:
    """Load a file that imports nothing of ours, and return one of its functions."""
    spec = importlib.util.spec_from_file_location(f"_forked_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _nothing() -> None:
    pass


if __name__ == "__main__":
    gc.enable()
    main(sys.argv[1:])
