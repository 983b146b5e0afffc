"""Run systemd-tmpfiles on a directory."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest


def clean(root: Path) -> None:
    """Delete entries of a directory that are older than 100 ms and not in use."""
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed")
    rules = root.with_name(f"{root.name}.conf")
    rules.write_text(f"e {root} - - - abcmABCM:100ms\n")
    (root / "unused").mkdir()
    time.sleep(0.5)
    subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True, timeout=30)
    assert not (root / "unused").exists()
