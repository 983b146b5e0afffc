"""The UNIX socket by which the state directory's owner reaches the master.

It lies in the state directory, which nobody else can enter. Its address has 108 bytes (unix(7) ``sun_path``), so that a
longer path is named through ``/proc/self/fd``. On file systems without sockets it lies in a new directory of the user's
runtime or temporary directory, mode 0700; ``MasterRecord.socket`` says where.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.master.state_directory import StateDirectory

_NAME = "master.sock"
_PREFIX = "dstrial-socket-"
_MAX_ADDRESS_BYTES = 107
_BACKLOG = 128


@contextlib.contextmanager
def listening(state: StateDirectory, last: str) -> Iterator[tuple[socket.socket, Path]]:
    """Listen while the block lasts; yield the socket and its place.

    ``last`` is where the last master, which may have been killed, listened; empty for nowhere.
    """
    if last:
        _remove(Path(last))
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        path = _bind_somewhere(listener, state.path)
        try:
            # Nobody can connect before it listens.
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            yield listener, path
        finally:
            _remove(path)


def connect(path: str, timeout_s: float | None) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        with _address(Path(path)) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _bind_somewhere(listener: socket.socket, state_dir: Path) -> Path:
    path = state_dir / _NAME
    try:
        path.unlink(missing_ok=True)
        with _address(path) as address:
            listener.bind(address)
        return path
    except OSError as error:
        why = error
    try:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        directory = Path(
            tempfile.mkdtemp(prefix=_PREFIX, dir=runtime if runtime and Path(runtime).is_dir() else None)
        )
        with _address(directory / _NAME) as address:
            listener.bind(address)
        return directory / _NAME
    except OSError as error:
        raise MasterError(
            f"a socket cannot be made in {state_dir} ({why.strerror}) nor in the temporary directory ({error.strerror}); "
            "expected one of them to hold it. Name another --state-dir, or a TMPDIR that can be written to."
        ) from error


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """The path itself where it is short enough, else one that is."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove an unused socket and the directory made for it, nothing else."""
    with contextlib.suppress(OSError):
        if path.name != _NAME or not stat.S_ISSOCK(path.lstat().st_mode):
            return
        path.unlink()
        if path.parent.name.startswith(_PREFIX):
            path.parent.rmdir()
