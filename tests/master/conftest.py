"""Fixtures that give tests a running master."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Master, serving

from dstrial.testing.master import MasterForTest, master_for_test


@pytest.fixture(scope="session")
def task_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    """A master with one slot for command and TensorBoard tests, which restart it.

    Its settings are in ``master.yaml`` beside its state directory.
    """
    directory = tmp_path_factory.mktemp("task_master")
    settings = directory / "master.yaml"
    settings.write_text("tensorboard_timeout: 600\n")
    with master_for_test(directory, num_slots=1, options=("--config-file", str(settings))) as master:
        yield master


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master for tests that do not change its store."""
    with serving(tmp_path_factory.mktemp("state")) as master:
        yield master


@pytest.fixture
def fresh_master(tmp_path: Path) -> Iterator[Master]:
    """A new master for each test."""
    with serving(tmp_path / "state") as master:
        yield master


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A short path for TMPDIR: socket paths below it are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="short-", ignore_cleanup_errors=True) as name:
        yield Path(name)
