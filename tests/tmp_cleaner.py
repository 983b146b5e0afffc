"""What a cleaner of temporary files does at once to what would be old one day."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest


def clean(root: Path) -> None:
    """Have systemd's cleaner delete what lies below a directory and is older than a moment."""
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles is not installed")
    rules = root.with_name(f"{root.name}.conf")
    rules.write_text(f"e {root} - - - abcmABCM:100ms\n")
    (root / "nobodys").mkdir()
    time.sleep(0.5)
    subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True, timeout=30)
    assert not (root / "nobodys").exists()
