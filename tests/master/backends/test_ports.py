"""Ports chosen for allocations are free and not shared."""

from __future__ import annotations

import socket

import pytest

from dstrial.errors import MasterError
from dstrial.master.backends import environment
from dstrial.master.backends.environment import choose_ports

pytestmark = pytest.mark.process


def test_choose_ports_avoids_used_ports() -> None:
    used: set[int] = set()
    for _ in range(20):
        chosen = choose_ports(used)
        assert len(set(chosen.values())) == len(chosen) == 5
        assert not used & set(chosen.values())
        used |= set(chosen.values())


def test_choose_ports_without_free_port_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(environment, "_NUM_PORTS", 1)

        with pytest.raises(MasterError, match=f"every port from {port} to {port} is in use"):
            choose_ports((), {"C10D_PORT": port})
