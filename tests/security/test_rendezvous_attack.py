"""Ports of running jobs: loopback only, and safe from torchrun's pickle attack."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import attack, held, write_project
from listening import Listener, listeners
from waiting import wait_for

from dstrial.testing.master import MasterForTest

pytestmark = [pytest.mark.process, pytest.mark.ranks, pytest.mark.timeout(600)]

LAUNCH = [sys.executable, "-m", "dstrial.launch", "--slots", "2"]
TRIAL = [*LAUNCH, "--config", "exp.yaml", "--trial", "held_trials:HeldTrial"]
SCRIPT = [*LAUNCH, "held_trials.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
JOBS = ("trial", "script", "dstrial run", "det experiment")


@contextlib.contextmanager
def running(job: str, directory: Path, master: MasterForTest) -> Iterator[set[int]]:
    """Run a job whose two ranks block in their second batch; yield its process ids."""
    context = write_project(directory)
    commands = {
        "trial": TRIAL,
        "script": [*SCRIPT, str(directory)],
        "torchrun": [*TORCHRUN, "held_trials.py", str(directory)],
        "dstrial run": [sys.executable, "-m", "dstrial.cli", "run", "exp.yaml", "."],
        "det experiment": [
            *(sys.executable, "-m", "determined.cli", "experiment", "create", "exp.yaml", ".", "-f"),
        ],
    }
    env = master.env if job in ("dstrial run", "det experiment") else {}
    # Only torchrun may be forked from the test server: its ranks are new processes in any case.
    with held(commands[job], directory, context, is_fork=job == "torchrun", **env) as pids:
        yield pids


def outside_address() -> str:
    """Return this machine's external address; 127.0.0.2 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def targets(found: list[Listener]) -> list[str]:
    ports = sorted({listener.port for listener in found if listener.kind != "unix"})
    return [f"{host}:{port}" for port in ports for host in (outside_address(), "127.0.0.1")]


def show(title: str, found: list[Listener]) -> None:
    print(f"\n{title}:", *(f"  {listener}" for listener in found), sep="\n")


@pytest.mark.exhaustive("[trial]")
@pytest.mark.parametrize("job", JOBS)
def test_job_listens_on_loopback_and_unpickles_nothing(
    job: str, tmp_path: Path, shared_master: MasterForTest
) -> None:
    with running(job, tmp_path, shared_master) as pids:
        found = listeners(pids)
        show(job, found)
        assert found
        print(attack(targets(found), tmp_path))
        # torchrun's agent would read an injected pickle within 50 ms, its polling interval.
        with contextlib.suppress(AssertionError):
            wait_for((tmp_path / "owned").exists, deadline_s=3.0)
    assert not (tmp_path / "owned").exists()
    assert [str(listener) for listener in found if not listener.is_loopback] == []
    # The ranks listen for gloo. Only a script may need a rendezvous store, which listens, too.
    tcp = [listener.program for listener in found if listener.kind != "unix"]
    assert set(tcp) == {
        "dstrial.launch.rank_main",
        *(["dstrial.launch.store_process"] if job == "script" else []),
    }
    assert tcp.count("dstrial.launch.store_process") == (job == "script")
    assert [str(listener) for listener in found if listener.kind == "unix"] == []


@pytest.mark.exhaustive(
    "tests/security/test_rendezvous_attack.py::test_job_listens_on_loopback_and_unpickles_nothing"
)
def test_torchrun_ranks_listen_on_loopback_only(tmp_path: Path, shared_master: MasterForTest) -> None:
    with running("torchrun", tmp_path, shared_master) as pids:
        found = listeners(pids)
        show("torchrun", found)

    # torchrun's own rendezvous and store listen on all interfaces; only the ranks are checked.
    ours = [listener for listener in found if listener.program != "torch.distributed.run"]
    assert {listener.program for listener in ours} == {"held_trials.py"}
    assert [str(listener) for listener in ours if not listener.is_loopback] == []
