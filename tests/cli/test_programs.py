"""Commands are named so that they can be typed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dstrial.cli.programs import typed

BIN = Path(sys.executable).parent


def test_a_command_that_is_not_on_path_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")

    monkeypatch.chdir(BIN.parent)
    assert typed("det") == "bin/det"
    monkeypatch.chdir("/usr")
    assert typed("det") == str(BIN / "det")


def test_a_command_that_is_on_path_is_named_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}/usr/bin")

    assert typed("det") == "det"


def test_another_command_of_that_name_is_not_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "det").write_text("#!/bin/sh\n")
    (tmp_path / "det").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{BIN}")
    monkeypatch.chdir("/usr")

    assert typed("det") == str(BIN / "det")
