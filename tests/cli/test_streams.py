"""Output streams that lose their reader, printed commands, duration arguments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dstrial.cli.streams import LossTolerantStream, command_of, det_for


def test_stream_drops_writes_after_write_error() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        stream = LossTolerantStream(file)
        stream.write("read\n")
        assert os.read(reader, 100) == b"read\n"
        assert not stream.is_lost
        os.close(reader)
        assert stream.write("not read\n") == len("not read\n")
        assert stream.is_lost
        file.write("by somebody else\n")
        file.flush()
    with open("/dev/full", "w") as file:
        stream = LossTolerantStream(file)
        stream.write("lost\n")
        assert stream.is_lost


BIN = Path(sys.executable).parent


def test_command_of_prefers_bare_name_if_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If PATH finds another ``det`` or none, this environment's path is returned."""
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.chdir(BIN.parent)
    assert command_of("det") == "bin/det"
    monkeypatch.chdir("/usr")
    assert command_of("det") == str(BIN / "det")
    monkeypatch.setenv("PATH", str(BIN), prepend=os.pathsep)
    assert command_of("det") == "det"
    (tmp_path / "det").write_text("#!/bin/sh\n")
    (tmp_path / "det").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert command_of("det") == str(BIN / "det")


@pytest.mark.parametrize(
    ("variable", "printed"),
    [
        (None, "det -m http://localhost:43210"),
        ("http://localhost:8080", "det -m http://localhost:43210"),
        ("http://localhost:43210/", "det"),
        ("localhost:43210", "det"),
    ],
)
def test_det_command_names_non_default_master(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, printed: str
) -> None:
    monkeypatch.setenv("PATH", str(BIN))
    monkeypatch.delenv("DET_MASTER_ADDR", raising=False)
    monkeypatch.delenv("DET_MASTER", raising=False)
    assert det_for("http://localhost:8080") == "det"
    if variable is not None:
        monkeypatch.setenv("DET_MASTER", variable)

    assert det_for("http://localhost:43210") == printed
