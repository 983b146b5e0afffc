"""Clients of each test's master: ``det``, session and SDK."""

from collections.abc import Callable
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
def session_of(fresh_master: Master) -> Callable[[str], api.Session]:
    """Function that returns a user's session at the test's master."""
    return lambda user: api.Session(fresh_master.address, user, fresh_master.tokens[user], None)


@pytest.fixture
def session(session_of: Callable[[str], api.Session]) -> api.Session:
    return session_of("determined")


@pytest.fixture
def admin(session_of: Callable[[str], api.Session]) -> api.Session:
    return session_of("admin")


@pytest.fixture
def trial_session(fresh_master: Master) -> api.Session:
    """Session inside trial 1, as user determined."""
    return api.Session(fresh_master.address, "determined", fresh_master.tokens["trial-1-user"], None)


@pytest.fixture
def determined(session: api.Session) -> client.Determined:
    """Determined's SDK, logged in to the test's master as user determined."""
    return client.Determined._from_session(session)
