import dataclasses
import os
import socket
import threading

import pytest

from dstrial.doctor import environment
from dstrial.doctor.environment import MasterState, Network
from dstrial.master.state_directory import MasterRecord, StateDirectory, process_start_time
from dstrial.testing.master import master_for_test

NODE = Network("node7", ("10.0.0.7",), 0.01, has_loopback=True, names_loopback=True)
RECORD = MasterRecord(1, "1", 8080, ({"kind": "cpu"},), "cluster", "0.1.0")


def by_name(findings):
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(
    ("changes", "name", "status", "mends"),
    [
        ({"resolved": ()}, "hostname", "note", "/etc/hosts"),
        ({"resolve_s": None}, "hostname", "note", "/etc/hosts"),
        ({"resolve_s": 2.5}, "hostname", "note", "/etc/hosts"),
        ({"has_loopback": False}, "loopback", "problem", "ip link set lo up"),
        ({"names_loopback": False}, "loopback", "problem", "/etc/hosts"),
        ({}, "hostname", "ok", ""),
    ],
)
def test_network_is_judged(changes, name, status, mends):
    found = by_name(environment.judge_network(dataclasses.replace(NODE, **changes)))[name]
    assert found.status == status
    assert mends in found.todo


@pytest.mark.process
def test_this_network_is_measured():
    measured = environment.measure_network()
    assert measured.hostname == socket.gethostname()
    assert measured.has_loopback


@pytest.mark.parametrize(
    ("master", "name", "status"),
    [
        (MasterState(RECORD), "master", "ok"),
        (MasterState(RECORD, "no answer within 3 s"), "master", "problem"),
        (MasterState(MasterRecord(1, "1", 8080, (), "c", "0.0.9")), "master version", "note"),
        (MasterState(None, default_port_is_free=False), "master", "note"),
        (MasterState(None), "master", "ok"),
        (MasterState(None, error="cannot be read"), "state directory", "problem"),
    ],
)
def test_master_is_judged(master, name, status):
    found = by_name(environment.judge_master(master, version="0.1.0"))[name]
    assert found.status == status
    assert bool(found.todo) is (status != "ok")


@pytest.mark.process
def test_master_is_found_answering_then_gone_or_silent(tmp_path):
    with master_for_test(tmp_path, num_slots=3) as master:
        (found,) = environment.judge_master(environment.measure_master(master.state), version="0.1.0")
        assert "3 slots (cpu)" in found.what
        state = master.state
    assert environment.measure_master(state).record is None
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        taken = []
        threading.Thread(target=lambda: taken.append(server.accept()), daemon=True).start()
        silent = StateDirectory(tmp_path / "silent")
        silent.make()
        start_time = process_start_time(os.getpid())
        silent.write_record(MasterRecord(os.getpid(), start_time, server.getsockname()[1], (), "c", "0.1.0"))
        assert "no answer" in environment.measure_master(silent).answer
        for connection, _ in taken:
            connection.close()


@pytest.mark.parametrize(
    ("environ", "name", "status"),
    [
        ({"HOME": "/root", "PATH": "/bin"}, "variables", "ok"),
        ({"DET_PASS": "x", "AWS_SECRET_ACCESS_KEY": "y", "CUDA_VISIBLE_DEVICES": ""}, "variables", "ok"),
        ({"DS_ACCELERATOR": "gpu"}, "DS_ACCELERATOR", "problem"),
        ({"DS_ACCELERATOR": "cuda"}, "DS_ACCELERATOR", "ok"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK, WORLD_SIZE", "note"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT", "ok"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "note"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "CUDA_LAUNCH_BLOCKING", "ok"),
        ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG", "ok"),
        ({"http_proxy": "http://proxy:3128"}, "http_proxy", "problem"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, "http_proxy", "ok"),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, "HTTP_PROXY", "ok"),
    ],
)
def test_variables_that_change_training_are_listed(environ, name, status):
    (found,) = environment.judge_variables(environ)
    assert (found.name, found.status) == (name, status)


def test_variables_are_shown_shortened_and_without_passwords():
    environ = {"http_proxy": "http://ada:secret@proxy:3128", "DET_MASTER": "https://ada:secret@host:8080"}
    found = by_name(environment.judge_variables({**environ, "NCCL_TOPO_FILE": "x" * 5000}))
    assert "secret" not in "".join(finding.what for finding in found.values())
    assert "proxy:3128" in found["http_proxy"].what
    assert len(found["NCCL_TOPO_FILE"].what) < 300
