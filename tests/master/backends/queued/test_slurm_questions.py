"""What the master asks Slurm, whose commands are scripts of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dstrial.master.backends.queued.slurm import SlurmEngine

pytestmark = pytest.mark.process


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return what puts a command of that name before Slurm's."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", str(commands), prepend=":")

    def write(name: str, body: str) -> None:
        path = commands / name
        path.write_text(f"#!/bin/sh\ncd {tmp_path}\n{body}\n")
        path.chmod(0o755)

    return write


@pytest.fixture
def engine(tmp_path: Path) -> SlurmEngine:
    return SlurmEngine(tmp_path / "slurm", tmp_path, "c", {}, wants_devices=False)


def test_nobody_uses_what_another_has_begun_to_wait_for(
    engine: SlurmEngine, command: Callable[[str, str], None], tmp_path: Path
) -> None:
    command("sinfo", "touch asked; echo 'host1 |idle |0/4/0/4 |(null) |(null) |'")
    command("squeue", "")
    assert engine.spare() == {"host1": 4}
    # Somebody's job comes between the two questions.
    (tmp_path / "asked").unlink()
    command("squeue", "[ ! -e asked ] || echo 'Resources |train |'")
    assert engine.spare() == {}


def test_nodes_that_are_down_or_drained_have_slots_too(
    engine: SlurmEngine, command: Callable[[str, str], None]
) -> None:
    command("sinfo", "echo 'host1|idle|4|(null)'; echo 'host2|drained|2|(null)'; echo 'host3|down*|8|(null)'")
    assert engine.capacity() == {"host1": 4}
    assert engine.down() == {"host2": 2, "host3": 8}
