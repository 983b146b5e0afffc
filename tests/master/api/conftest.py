"""Clients of each test's master: ``det``, session and SDK."""

from pathlib import Path

import pytest
from det_here import DetHere
from determined.common import api
from determined.experimental import client
from serving import Master


@pytest.fixture
def det(fresh_master: Master, tmp_path: Path) -> DetHere:
    """The ``det`` command, logged in to the test's master as user determined."""
    return DetHere(fresh_master.address, "determined", fresh_master.tokens["determined"], tmp_path / "home")


@pytest.fixture
def session(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["determined"], None)


@pytest.fixture
def admin(fresh_master: Master) -> api.Session:
    return api.Session(fresh_master.address, "admin", fresh_master.tokens["admin"], None)


@pytest.fixture
def determined(session: api.Session) -> client.Determined:
    """Determined's SDK, logged in to the test's master as user determined."""
    return client.Determined._from_session(session)
