"""Private directories that live only as long as a process, even if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Reads until this process has closed its end or died, then deletes. It ignores what Ctrl-C sends to all of a terminal.
_KEEPER = 'trap "" INT TERM HUP; read -r _; rm -rf -- "$1"'


def compile_cache() -> dict[str, str]:
    """Return the variable that puts torch's compile cache into the user's own cache.

    Empty if it is set or there is no place. By itself torch loads compiled code from ``/tmp/torchinductor_<user>``, a name that
    another account may make first (torch 2.13 ``_inductor/runtime/cache_dir_utils.py``, ``default_cache_dir``).
    """
    if os.environ.get(_CACHE_VARIABLE):
        return {}
    import platformdirs

    directory = Path(platformdirs.user_cache_dir("dstrial")) / "torchinductor"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # an account without a home directory
        return {}
    return {_CACHE_VARIABLE: str(directory)}


@contextlib.contextmanager
def scratch_directory(prefix: str) -> Iterator[Path]:
    """Make a directory of mode 0700, deleted when the block or the process ends.

    After SIGKILL no code of the process runs, so that a shell waits for its end with a pipe that the kernel closes. In an
    allocation none is needed: its whole temporary directory goes with it.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name, _keeper(name):
        lock = lock_directory(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(lock)


def lock_directory(directory: Path) -> int:
    """Return a descriptor that keeps cleaners out of a directory while it is open.

    Source: tmpfiles.d(5): systemd's cleaner skips a directory on which it cannot get a BSD lock, and all below.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without such locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


@contextlib.contextmanager
def _keeper(directory: str) -> Iterator[None]:
    shell = shutil.which("sh")
    if os.environ.get(ALLOCATION_DIR_VARIABLE) or shell is None:
        yield
        return
    keeper = subprocess.Popen(
        [shell, "-c", _KEEPER, "dstrial-scratch", directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        # It deletes what TemporaryDirectory would, only sooner; by its end both are done.
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):
            keeper.stdin.close()
        keeper.wait()
