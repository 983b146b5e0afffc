"""Linux namespaces that simulate power loss, a full disk or an unmounted disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

import pytest


def unshare(*kinds: str, probe: str) -> list[str]:
    """Return an ``unshare`` command prefix; skip the test if ``unshare`` is forbidden.

    Args:
        kinds: options of unshare(1), such as ``--mount``.
        probe: shell command that must succeed in the namespaces; else the test is skipped.
    """
    as_root: Sequence[str] = () if os.getuid() == 0 else ("--map-root-user",)
    words = ["unshare", *kinds, *as_root]
    if shutil.which("unshare") is None:
        pytest.skip("Requires: [unshare(1)]")
    tried = subprocess.run([*words, "sh", "-ec", probe], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"Requires: [namespaces: {' '.join(kinds)}] ({tried.stderr.strip()})")
    return words
