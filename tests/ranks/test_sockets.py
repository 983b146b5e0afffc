"""Addresses, ports and the limit of open files for the sockets of ranks."""

from __future__ import annotations

import random
import socket
import subprocess
import sys

import pytest

from dstrial.ranks.sockets import free_port, listening_socket, loopback_only

pytestmark = pytest.mark.process

EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


@pytest.mark.parametrize(
    ("addr", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        (socket.gethostname(), EVERYWHERE),  # other machines may resolve a host name differently
    ],
)
def test_listening_socket_binds_loopback_or_all_interfaces(addr: str, bound: str) -> None:
    with listening_socket(addr, 0) as server:
        assert server.getsockname()[0] == bound
        if bound == EVERYWHERE:
            socket.create_connection(("127.0.0.1", server.getsockname()[1]), timeout=5).close()


def test_listening_socket_rejects_port_in_use() -> None:
    with listening_socket("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", taken.getsockname()[1])


def test_free_port_can_be_bound() -> None:
    listening_socket("127.0.0.1", free_port()).close()


def test_free_port_is_independent_of_random_seed() -> None:
    random.seed(3)
    before = random.getstate()
    first = [free_port() for _ in range(3)]
    assert random.getstate() == before
    random.seed(3)  # as another process whose trial has the same seed
    assert [free_port() for _ in range(3)] != first


def test_loopback_only_keeps_user_interface() -> None:
    assert loopback_only({}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert loopback_only({"NCCL_SOCKET_IFNAME": "ib0"}) == {"GLOO_SOCKET_IFNAME": "lo"}


LIMITED = """
import resource, sys
from dstrial.ranks.sockets import raise_file_limit
hard, num_ranks = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
raise_file_limit(num_ranks)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def raise_in_process(hard: int, num_ranks: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", LIMITED, str(hard), str(num_ranks)]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)


def test_file_limit_is_raised_to_hard_limit() -> None:
    assert raise_in_process(1024, 400).stdout == "(1024, 1024)\n"
    assert raise_in_process(1024, 1).stdout == "(64, 1024)\n"
