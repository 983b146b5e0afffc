"""The UNIX socket through which the state directory's owner reaches the master.

The socket is in the state directory, which has mode 0700. A socket address is limited to 108 bytes (unix(7) ``sun_path``), so a
longer path is addressed through ``/proc/self/fd``. If the file system has no sockets, the socket is in a new directory (mode
0700) below the user's runtime or temporary directory. ``MasterRecord.socket`` is its path.
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
    """Listen on the owner's socket; yield the listening socket and its path.

    ``last`` is the socket path of the last master, or empty. A master that was killed has left its file, which is removed.
    """
    if last:
        _remove(Path(last))
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        path = _bind_somewhere(listener, state.path)
        try:
            # Set the mode before listen(), as no client can connect until then.
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
        no_socket = error
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
            f"a socket cannot be made in {state_dir} ({no_socket.strerror}) nor in the temporary directory ({error.strerror}); "
            "expected one of them to hold it. Name another --state-dir, or a TMPDIR that can be written to."
        ) from error


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield the address of a socket path: an alias in ``/proc/self/fd`` if too long."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove the owner's socket, and its directory if that was created for the socket."""
    with contextlib.suppress(OSError):
        if path.name != _NAME or not stat.S_ISSOCK(path.lstat().st_mode):
            return
        path.unlink()
        if path.parent.name.startswith(_PREFIX):
            path.parent.rmdir()
