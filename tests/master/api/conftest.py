from collections.abc import Iterator
from pathlib import Path

import pytest
from det_here import DetHere
from determined.common import api
from determined.experimental import client
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


@pytest.fixture
def det(fresh_master: Master, tmp_path: Path) -> DetHere:
    """Somebody who types commands for the test's own master, as the user determined."""
    return DetHere(fresh_master.address, "determined", fresh_master.tokens["determined"], tmp_path / "home")


@pytest.fixture
def determined(fresh_master: Master) -> client.Determined:
    """The SDK at the test's own master, as the user determined."""
    session = api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)
    return client.Determined._from_session(session)
