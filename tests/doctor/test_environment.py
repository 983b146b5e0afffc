import os
import re
import socket
import threading
from pathlib import Path

import pytest

import dstrial
from dstrial.doctor import environment
from dstrial.master.state_directory import MasterRecord, StateDirectory, process_start_time
from dstrial.testing.master import master_for_test

ASKED = [
    "torch>=2.6",
    "deepspeed>=0.19.8,<0.20",
    "determined==0.38.1",
    'tokenizers>=0.22; extra == "huggingface"',
    'winreg; sys_platform == "win32"',
]
GOOD = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "determined": "0.38.1"}


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("torch", "2.14.0.dev20261101", None),
        ("torch", "2.5.1", ">=2.6"),
        ("deepspeed", "0.20.0", "<0.20"),
        ("determined", None, "missing"),
    ],
)
def test_unsupported_package_is_problem(name, version, expected):
    first, *found = environment.judge_packages(ASKED, {**GOOD, name: version}.get)
    assert first.status == "ok"
    assert [(one.name, one.status) for one in found] == ([] if expected is None else [(name, "problem")])
    assert all(expected in one.what and one.todo for one in found)


def test_this_environment_has_required_packages():
    found = environment.check_python()
    assert {finding.status for finding in found} == {"ok"}
    text = Path(dstrial.__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] == dstrial.__version__


@pytest.mark.parametrize(
    ("changes", "name", "status", "mends"),
    [
        ({"addresses": []}, "hostname", "note", "/etc/hosts"),
        ({"has_loopback": False}, "loopback", "problem", "ip link set lo up"),
        ({"localhost": []}, "loopback", "problem", "/etc/hosts"),
        ({}, "hostname", "ok", ""),
    ],
)
def test_network_is_judged(changes, name, status, mends):
    usual = {"localhost": ["127.0.0.1"], "addresses": ["10.0.0.7"], "has_loopback": True}
    found = {one.name: one for one in environment.judge_network("node7", **{**usual, **changes})}
    assert found[name].status == status
    assert mends in found[name].todo


@pytest.mark.process
def test_master_is_found_answering_then_gone_or_silent(tmp_path, monkeypatch):
    with master_for_test(tmp_path, num_slots=3) as master:
        (found,) = environment.check_master(master.state)
        assert (found.status, "3 slots" in found.what) == ("ok", True)
        monkeypatch.setattr(environment, "__version__", "99")
        assert environment.check_master(master.state)[1].name == "master version"
        state = master.state
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        monkeypatch.setattr(environment.daemon, "DEFAULT_PORT", 0)
        (found,) = environment.check_master(state)
        assert found.status == "ok"
        server.listen()
        monkeypatch.setattr(environment.daemon, "DEFAULT_PORT", server.getsockname()[1])
        (found,) = environment.check_master(state)
        assert (found.status, "another program" in found.what) == ("note", True)
        taken = []
        threading.Thread(target=lambda: taken.append(server.accept()), daemon=True).start()
        silent = StateDirectory(tmp_path / "silent")
        silent.make()
        start_time = process_start_time(os.getpid())
        silent.write_record(MasterRecord(os.getpid(), start_time, server.getsockname()[1], (), "c", "0.1.0"))
        (found,) = environment.check_master(silent)
        assert (found.status, "no answer" in found.what) == ("problem", True)
        for connection, _ in taken:
            connection.close()


@pytest.mark.parametrize(
    ("environ", "name", "status"),
    [
        ({"HOME": "/root", "NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "0"}, "variables", "ok"),
        ({"DS_ACCELERATOR": "gpu"}, "DS_ACCELERATOR", "problem"),
        ({"DS_ACCELERATOR": "cuda"}, "variables", "ok"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK, WORLD_SIZE", "note"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "note"),
        ({"http_proxy": "http://ada:secret@proxy:3128"}, "http_proxy", "problem"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, "variables", "ok"),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, "variables", "ok"),
    ],
)
def test_variables_that_change_training_are_listed(environ, name, status):
    (found,) = environment.judge_variables(environ)
    assert (found.name, found.status) == (name, status)
    assert "secret" not in found.what
