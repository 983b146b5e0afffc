"""Create private directories that are deleted at process exit, even after SIGKILL."""

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
# Shell script: wait until the process that made the directory closes the pipe or dies, then delete the directory. The trap
# ignores Ctrl-C.
_DELETE_AT_EOF = 'trap "" INT TERM HUP; read -r _; rm -rf -- "$1"'


def compile_cache() -> dict[str, str]:
    """Return the variable that moves torch's compile cache to a private directory.

    The result is {name: path}, or empty if the variable is already set or there is no home directory. By default torch loads
    compiled code from ``/tmp/torchinductor_<user>``, which another account may create first (torch 2.13
    ``_inductor/runtime/cache_dir_utils.py``).
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
    """Yield a new directory of mode 0700, deleted when the block or the process ends.

    To delete it after SIGKILL, a shell process waits on a pipe that the kernel then closes. An allocation needs no shell,
    because the allocation's temporary directory is deleted.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name, _deletion_after_exit(name):
        lock = lock_directory(Path(name))
        try:
            yield Path(name)
        finally:
            os.close(lock)


def lock_directory(directory: Path) -> int:
    """Protect a directory from temp-file cleaners; return the descriptor of the lock.

    The lock ends when the descriptor is closed.

    Source: tmpfiles.d(5): systemd's cleaner skips a directory on which it cannot get a BSD lock, and all below.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # the file system has no BSD locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


@contextlib.contextmanager
def _deletion_after_exit(directory: str) -> Iterator[None]:
    shell = shutil.which("sh")
    if os.environ.get(ALLOCATION_DIR_VARIABLE) or shell is None:
        yield
        return
    shell_process = subprocess.Popen(
        [shell, "-c", _DELETE_AT_EOF, "dstrial-scratch", directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    try:
        yield
    finally:
        # The shell deletes the same files as TemporaryDirectory, which runs after it: wait for the shell.
        assert shell_process.stdin is not None
        with contextlib.suppress(OSError):
            shell_process.stdin.close()
        shell_process.wait()
