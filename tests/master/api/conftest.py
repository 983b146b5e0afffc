from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Master, serving


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
