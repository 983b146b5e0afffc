"""The UNIX socket through which the state directory's owner reaches the master.

The socket is in the state directory, which has mode 0700. Socket addresses are limited to 108 bytes (unix(7) ``sun_path``), so
longer paths are addressed through ``/proc/self/fd``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.master.state_directory import StateDirectory

_MAX_ADDRESS_BYTES = 107  # without the NUL at the end
_BACKLOG = 128


@contextlib.contextmanager
def listening(state: StateDirectory) -> Iterator[tuple[socket.socket, Path]]:
    """Listen on the owner's socket; yield the listening socket and its path.

    The stale socket file of a killed master is removed.
    """
    path = state.path / "master.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        try:
            path.unlink(missing_ok=True)
            with _address(path) as address:
                listener.bind(address)
        except OSError as error:
            raise MasterError(
                f"a socket cannot be made in {state.path} ({error.strerror}); expected a file system with sockets. Name "
                "another --state-dir."
            ) from error
        try:
            # Set the mode before listen(), as no client can connect until then.
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            yield listener, path
        finally:
            path.unlink(missing_ok=True)


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


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a socket's address: ``path``, or a ``/proc/self/fd`` alias if too long."""
    if len(os.fsencode(path)) <= _MAX_ADDRESS_BYTES:
        yield str(path)
        return
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
