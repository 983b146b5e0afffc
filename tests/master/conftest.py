"""Fixtures of the tests that need a master of their own between them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Master, serving

from dstrial.testing.master import MasterForTest, master_for_test


@pytest.fixture(scope="session")
def task_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    """One master with one slot for the tests of commands and TensorBoards, which also start it anew.

    Its settings are in ``master.yaml`` beside its state directory.
    """
    directory = tmp_path_factory.mktemp("task_master")
    settings = directory / "master.yaml"
    settings.write_text("tensorboard_timeout: 600\n")
    with master_for_test(directory, num_slots=1, options=("--config-file", str(settings))) as master:
        yield master


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master for tests that only look."""
    with serving(tmp_path_factory.mktemp("state")) as master:
        yield master


@pytest.fixture
def fresh_master(tmp_path: Path) -> Iterator[Master]:
    """A master of the test's own."""
    with serving(tmp_path / "state") as master:
        yield master


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short name, for TMPDIR: Determined's ranks make sockets below it, whose paths have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="short-", ignore_cleanup_errors=True) as name:
        yield Path(name)
