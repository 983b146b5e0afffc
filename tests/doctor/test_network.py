import dataclasses
import socket

import pytest

from dstrial.doctor import network
from dstrial.doctor.network import Network

NODE = Network(
    hostname="node7",
    resolved=("10.0.0.7",),
    resolve_s=0.01,
    interfaces={"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "docker0": ["172.17.0.1"], "eth1": []},
    has_loopback=True,
    names_loopback=True,
)


def judged(environ=None, **changes):
    found = network.judge(dataclasses.replace(NODE, **changes), environ or {})
    return {finding.name: finding for finding in found}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("eth", "eth0"),
        ("=eth", None),
        ("^docker,lo", "eth0"),
        ("^=eth0", "lo, docker0"),
        ("=eth0,docker0", "eth0, docker0"),
        ("eth1", None),
    ],
)
def test_nccl_chooses_interfaces_by_its_rules(chosen, expected):
    found = judged({"NCCL_SOCKET_IFNAME": chosen})["NCCL interface"]
    assert found.status == ("problem" if expected is None else "ok")
    assert expected is None or found.what.startswith(f"{expected} (")


def test_gloo_takes_the_interface_of_the_machines_name():
    assert judged()["gloo interface"].what.startswith("eth0 (10.0.0.7)")
    assert "docker0" in judged({"GLOO_SOCKET_IFNAME": "docker0"})["gloo interface"].what
    assert "loopback" in judged(resolved=("203.0.113.9",))["gloo interface"].what
    unknown = judged({"GLOO_SOCKET_IFNAME": "eth9"})["gloo interface"]
    assert unknown.status == "problem"
    assert "'eth9'" in unknown.what


def test_a_name_that_resolves_to_nothing_slowly_or_never_is_a_note():
    for change in ({"resolved": ()}, {"resolve_s": None}, {"resolve_s": 2.5}):
        found = judged(**change)["hostname"]
        assert found.status == "note"
        assert "/etc/hosts" in found.todo


def test_no_loopback_is_a_problem():
    assert judged(has_loopback=False)["loopback"].status == "problem"
    assert "/etc/hosts" in judged(names_loopback=False)["loopback"].todo


@pytest.mark.process
def test_this_machine_is_measured():
    measured = network.measure()
    assert measured.hostname == socket.gethostname()
    assert "127.0.0.1" in measured.interfaces["lo"]
    assert measured.has_loopback
