from pathlib import Path

import pytest
from det_here import DetHere
from determined.common import api
from determined.experimental import client
from serving import Master


@pytest.fixture
def det(fresh_master: Master, tmp_path: Path) -> DetHere:
    """Somebody who types commands for the test's own master, as the user determined."""
    return DetHere(fresh_master.address, "determined", fresh_master.tokens["determined"], tmp_path / "home")


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)


@pytest.fixture
def admin(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "admin", fresh_master.tokens["admin"], None)


@pytest.fixture
def determined(session: api.Session) -> client.Determined:
    """The SDK at the test's own master, as the user determined."""
    return client.Determined._from_session(session)
