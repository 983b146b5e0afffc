"""Private directories: scratch space deleted at process exit, and a compile cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE

_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# Shell script that deletes directory $1 when its stdin, a pipe from the creating process, is closed. The trap ignores signals.
_DELETE_AT_EOF = 'trap "" INT TERM HUP; read -r _; rm -rf -- "$1"'


def compile_cache() -> dict[str, str]:
    """Return ``{"TORCHINDUCTOR_CACHE_DIR": path}``, a private and permanent directory.

    The default ``/tmp/torchinductor_<user>`` (torch 2.13 ``_inductor/runtime/cache_dir_utils.py``) is unsafe: another account
    may create it first. Return {} if the variable is already set or the directory cannot be created.
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

    Deleted even after SIGKILL: a shell process waits until this process's end closes a pipe, and deletes the directory. Under a
    master there is no shell process, because the master deletes the trial's whole temporary directory.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name, _deletion_after_exit(name):
        yield Path(name)


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
        # Wait for the shell, because TemporaryDirectory.cleanup comes next and deletes the same files.
        assert shell_process.stdin is not None
        with contextlib.suppress(OSError):
            shell_process.stdin.close()
        shell_process.wait()
