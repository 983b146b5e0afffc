import dataclasses
import socket

import pytest

from dstrial.doctor import network
from dstrial.doctor.libraries import TorchBuild
from dstrial.doctor.network import Interface, Network

CUDA = TorchBuild("2.11.0", cuda="13.0", nccl="2.28.3")
CPU = TorchBuild("2.13.0+cpu")
LO = Interface("lo", ("127.0.0.1", "::1"), True)
ETH0 = Interface("eth0", ("10.0.0.7",), True)
IB0 = Interface("ib0", ("192.168.1.7",), True)
DOCKER0 = Interface("docker0", ("172.17.0.1",), True)
NODE = Network(
    hostname="node7",
    resolved=("10.0.0.7",),
    resolve_s=0.01,
    interfaces=(LO, ETH0, DOCKER0),
    infiniband={},
    has_loopback=True,
    names_loopback=True,
)


def with_interfaces(*interfaces):
    return dataclasses.replace(NODE, interfaces=interfaces)


def by_name(findings):
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("interfaces", "chosen", "expected"),
    [
        ((LO, DOCKER0, ETH0), None, ["eth0"]),
        ((LO, DOCKER0, ETH0, IB0), None, ["ib0"]),
        ((LO, DOCKER0), None, ["docker0"]),
        ((LO,), None, ["lo"]),
        ((LO, ETH0, DOCKER0), "eth", ["eth0"]),
        ((LO, ETH0, DOCKER0), "=eth", []),
        ((LO, ETH0, DOCKER0), "^docker,lo", ["eth0"]),
        ((LO, ETH0, DOCKER0), "^=eth0", ["lo", "docker0"]),
        ((LO, ETH0, DOCKER0), "=eth0,docker0", ["eth0", "docker0"]),
        ((LO, dataclasses.replace(ETH0, is_up=False)), None, ["lo"]),
        ((LO, Interface("eth0", (), True)), None, ["lo"]),
    ],
)
def test_nccl_chooses_interfaces_by_its_rules(interfaces, chosen, expected):
    environ = {} if chosen is None else {"NCCL_SOCKET_IFNAME": chosen}
    assert network.nccl_interfaces(with_interfaces(*interfaces), environ) == expected


def test_gloo_takes_the_interface_of_the_machines_name():
    assert network.gloo_interface(NODE, {}) == "eth0"
    assert network.gloo_interface(NODE, {"GLOO_SOCKET_IFNAME": "docker0"}) == "docker0"
    assert network.gloo_interface(dataclasses.replace(NODE, resolved=("203.0.113.9",)), {}) is None


def test_a_chosen_interface_that_is_not_there_is_a_problem():
    environ = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "=eth9"}
    found = by_name(network.judge(NODE, CUDA, environ))
    assert "'eth9'" in found["gloo interface"].what
    assert {found["gloo interface"].status, found["NCCL interface"].status} == {"problem"}


def test_nccl_is_no_matter_to_a_cpu_build():
    assert "NCCL interface" not in by_name(network.judge(NODE, CPU, {}))


def test_a_name_that_resolves_to_nothing_slowly_or_never_is_a_note():
    for change in ({"resolved": ()}, {"resolve_s": None}, {"resolve_s": 2.5}):
        found = by_name(network.judge(dataclasses.replace(NODE, **change), CPU, {}))["hostname"]
        assert found.status == "note"
        assert "/etc/hosts" in found.todo


def test_no_loopback_is_a_problem():
    assert network.judge(dataclasses.replace(NODE, has_loopback=False), CPU, {})[0].status == "problem"
    assert "/etc/hosts" in network.judge(dataclasses.replace(NODE, names_loopback=False), CPU, {})[0].todo


def test_infiniband_ports_are_told_with_their_state():
    active = dataclasses.replace(NODE, infiniband={"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"})
    assert by_name(network.judge(active, CUDA, {}))["InfiniBand"].status == "ok"
    down = dataclasses.replace(NODE, infiniband={"mlx5_0/1": "DOWN"})
    assert by_name(network.judge(down, CUDA, {}))["InfiniBand"].status == "note"


@pytest.mark.process
def test_this_machine_is_measured():
    measured = network.measure()
    assert measured.hostname == socket.gethostname()
    assert "lo" in {interface.name for interface in measured.interfaces}
    assert any("127.0.0.1" in interface.addresses for interface in measured.interfaces)
    assert measured.has_loopback
