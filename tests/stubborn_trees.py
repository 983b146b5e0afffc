"""Directories that are hard to delete."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def make_deep(top: Path, num_levels: int = 1500) -> None:
    """Create nested directories whose deepest path exceeds the kernel's path limit."""
    top.mkdir(parents=True)
    here = os.open(top, os.O_DIRECTORY)
    for _ in range(num_levels):
        os.mkdir("deeper", dir_fd=here)
        above, here = here, os.open("deeper", os.O_DIRECTORY, dir_fd=here)
        os.close(above)
    os.close(os.open("lowest", os.O_CREAT, dir_fd=here))
    os.close(here)


@contextlib.contextmanager
def nobody_changes(directory: Path) -> Iterator[None]:
    """Make a directory immutable in the block, even for root."""
    if subprocess.run(["chattr", "+i", str(directory)], capture_output=True, check=False).returncode:
        pytest.skip("Requires: [root, a file system with chattr(1)]")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", str(directory)], check=True)
