"""Namespaces of Linux for tests: a machine whose power goes, a disk that is full, a file system that is unmounted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def unshare(*kinds: str, probe: str) -> list[str]:
    """Return the words that run a command in namespaces of its own; the test is skipped where that is forbidden.

    Args:
        kinds: options of unshare(1), such as ``--mount``.
        probe: shell words that do there what the test needs.
    """
    as_root: Sequence[str] = () if os.getuid() == 0 else ("--map-root-user",)
    words = ["unshare", *kinds, *as_root]
    if shutil.which("unshare") is None:
        pytest.skip("Requires: [unshare(1)]")
    tried = subprocess.run([*words, "sh", "-ec", probe], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"Requires: [namespaces: {' '.join(kinds)}] ({tried.stderr.strip()})")
    return words
