"""Scratch directories survive cleaners of temporary files while they are used."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from tmp_cleaner import clean

from dstrial.scratch import scratch_directory


@pytest.mark.process
def test_used_scratch_directory_survives_tmp_cleaner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "t"
    root.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    with scratch_directory("used-") as directory:
        (directory / "file").touch()

        clean(root)

        assert [path.name for path in directory.iterdir()] == ["file"]
    assert not directory.exists()
