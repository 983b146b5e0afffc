"""The run directory of the local tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.local.run_directory import RunDirectory


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", name="t", context_dir=tmp_path, command=["t"], config={})
