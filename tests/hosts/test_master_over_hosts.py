"""A master over ssh hosts: commands, host failures, recovery and cleanup."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines import Machine, machines
from master_on_hosts import CONFIG, MasterOnHosts, left_on, wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
_SLOW = {"zero_stage": 1, "pause_s": 0.1, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterOnHosts]:
    """Return a master with two hosts of two slots; tests must not break it."""
    with machines(3) as made:
        master = MasterOnHosts(made, tmp_path_factory.mktemp("master"), slots=2)
        said = master.up()
        assert said.returncode == 0, said.stdout
        assert re.search(r"host: +host2: 2 slots at 10\.77\.0\.12 \(eth0\)\n", said.stdout)
        yield master
        assert master.down().returncode == 0
        for host in master.hosts:
            wait_until(lambda one=host: not one.processes(), 10, lambda one=host: str(one.processes()))  # type: ignore[misc]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[MasterOnHosts]:
    """Return a new master with two hosts of one slot each."""
    with machines(3) as made:
        master = MasterOnHosts(made, tmp_path)
        assert master.up().returncode == 0
        yield master
        master.down("--now")


def _losses(log: str) -> list[str]:
    """Return the loss lines of a log without timestamps, sorted by batch."""
    found = [line.partition("|| ")[2] for line in log.splitlines() if " loss " in line]
    return sorted(found, key=lambda line: (int(line.split()[1]), line))


def _slow(slots: int, batches: int = 100) -> dict[str, Any]:
    return {
        "resources": {"slots_per_trial": slots},
        "searcher": {**CONFIG["searcher"], "max_length": {"batches": batches}},
        "hyperparameters": _SLOW,
    }


def _wait_until_no_trials(host: Machine, within_s: float) -> None:
    wait_until(lambda: not _trials_on(host), within_s, lambda: str(left_on(host)))


def _trials_on(host: Machine) -> list[str]:
    return [words for words in left_on(host).values() if "fork_server" not in words and "sh -c" not in words]


def test_det_lists_agents_and_runs_host_commands(quiet: MasterOnHosts) -> None:
    agents = quiet.det("agent", "list")
    assert re.search(r"host2 .*\| +2 \| +0 \| default +\| True +\| False +\| 10\.77\.0\.12", agents)
    assert quiet.det("slot", "list").count("FREE            | FREE") == 4

    said = quiet.det("command", "run", "--config", "resources.slots=2", "hostname")
    assert re.search(r"host[23]\n", said)
    assert "host1\n" in quiet.det("command", "run", "--config", "resources.slots=0", "hostname")

    refused = quiet.command("det", "command", "run", "--config", "resources.slots=5", "hostname")
    assert "resources.slots is 5; expected at most 2, the most slots of one machine" in refused.stdout


def test_host_relay_rejects_other_users_hides_secrets(
    quiet: MasterOnHosts,
) -> None:
    experiment = quiet.create(_slow(2, 60))
    trial = quiet.trials(experiment)[0]["id"]
    quiet.wait_for_log(trial, "batch 5 loss")
    host = next(one for one in quiet.hosts if _trials_on(one))
    relay = next((quiet.place / "state" / "hosts").glob(f"*/{host.name}/relay.json"))
    port = re.search(r"\d+", relay.read_text())
    assert port is not None
    ask = ["curl", "-s", "-m", "5", f"http://127.0.0.1:{port[0]}/info"]
    assert "0.38.1" in host.run(ask).stdout
    others = host.run(["setpriv", "--reuid=65534", "--clear-groups", *ask], cwd="/")
    assert others.returncode != 0
    assert others.stdout == ""

    specification = next(relay.parent.glob("allocations/*/spec.json"))
    assert specification.stat().st_mode & 0o077 == 0
    environment = json.loads(specification.read_text())["environment"]
    secrets = [environment[name] for name in ("DET_SESSION_TOKEN", "DET_USER_TOKEN")]
    assert not [words for words in host.processes().values() if any(one in words for one in secrets)]
    assert relay.parent.stat().st_mode & 0o077 == 0

    quiet.det("trial", "kill", str(trial))
    _wait_until_no_trials(host, 10)


def test_failed_rank_error_names_rank_and_exception(started: MasterOnHosts) -> None:
    experiment = started.create({**_slow(2), "max_restarts": 0})
    started.wait_for_log(1, "batch 5 loss")
    for workdir in (started.place / "state" / "hosts").glob("*/host3/allocations/*/workdir"):
        (workdir / "fail-host3").touch()
    started.wait_for_state(experiment, ("ERROR",))
    assert "trial 1 has failed: max_restarts is 0" in started.log(1)
    assert "rank 1: ValueError: asked to fail" in started.log(1)
    for host in started.hosts:
        _wait_until_no_trials(host, 10)


def test_trial_resumes_after_host_network_loss(started: MasterOnHosts) -> None:
    started.create(_slow(2))
    started.wait_for_log(1, "Reported checkpoint")
    cut = started.hosts[1]
    began_s = time.monotonic()
    cut.cut()
    assert started.wait_for_log(1, "host3 (rank 1) is silent for 5 s") < 10
    started.wait_for_log(1, "host3 (rank 1) is lost: silent: no heartbeat for 10 s")
    assert "is silent for 5 s, and lost after 10 s\n" in started.log(1)
    started.wait_for_log(1, "resumes from its checkpoint with 1", "resumed from checkpoint")
    at = started.log(1).count(" loss ")
    wait_until(lambda: started.log(1).count(" loss ") > at, 60, lambda: started.log(1))
    assert time.monotonic() < began_s + 60
    log = started.log(1)
    assert "allocation lost: host3 is " in log
    assert "of 2 restarts" not in log
    assert re.search(r"host3 .*\| False +\| False", started.det("agent", "list"))
    _wait_until_no_trials(cut, 5)  # its lease expires before the trial restarts

    status = started.command("dstrial", "status").stdout
    assert re.search(r"host: +host2, 1 slot\n", status)
    assert re.search(r"host: +host3, 1 slot, down for \d+ s: (silent|unreachable)", status)

    cut.heal()
    wait_until(
        lambda: re.search(r"host3 .*\| True +\| False", started.det("agent", "list")) is not None,
        40,
        lambda: started.det("agent", "list"),
    )


def test_dropped_connection_leaves_no_duplicate_trial(started: MasterOnHosts) -> None:
    """Killing sshd closes the agent's stdin, and the master cannot reconnect."""
    started.create(_slow(1, 2000))
    started.wait_for_log(1, "Reported checkpoint")
    (host,) = [one for one in started.hosts if _trials_on(one)]
    host.kill_sshd()
    started.wait_for_log(1, f"{host.name} (rank 0) is lost: disconnected")
    wait_until(lambda: started.log_now(1).count("Scheduling Trial 1") == 2, 60, lambda: started.log(1))
    assert not _trials_on(host)
    assert f"allocation lost: {host.name} is " in started.log(1)


def test_trial_survives_network_cut_agent_and_master_kill(started: MasterOnHosts) -> None:
    experiment = started.create(_slow(2, 300))
    started.wait_for_log(1, "Reported checkpoint")
    host = started.hosts[1]

    host.cut()
    time.sleep(2.5)  # the next TCP retransmissions are at 3 s and 6 s
    host.heal()
    time.sleep(3)
    agent = host.find("-u -m dstrial.master.backends.hosts.agent")
    assert agent is not None
    host.signal(agent, signal.SIGKILL)
    started.wait_for_log(1, "host3 (rank 1) is connected again")
    master = started.machine.find("dstrial.master.server")
    assert master is not None
    started.machine.signal(master, signal.SIGKILL)
    time.sleep(3)
    assert _trials_on(host)
    said = started.up()
    assert said.returncode == 0, said.stdout

    started.wait_for_state(experiment, ("COMPLETED",))
    log = started.log(1)
    assert log.count("Scheduling Trial 1") == 1, log
    batches = [int(line.split()[1]) for line in _losses(log)]
    assert sorted(set(batches)) == list(range(5, 301, 5))
    assert len({batches.count(batch) for batch in set(batches)}) == 1  # no line is logged twice


def test_up_with_unready_host_is_rejected(tmp_path: Path) -> None:
    with machines(3) as made:
        master = MasterOnHosts(made, tmp_path)
        made[3].stop_sshd()
        began_s = time.monotonic()
        said = master.up()
        assert said.returncode != 0
        assert "host3  refusing ssh's port (connection refused). Start sshd on host3" in said.stdout
        assert time.monotonic() < began_s + 8
        assert master.machine.find("dstrial.master.server") is None

        wrong = master.command("dstrial", "up", "--hostfile", "hots")
        assert "--hostfile is " in wrong.stdout
        both = master.command("dstrial", "up", "--hostfile", "hosts", "--slots", "2", "--exclude", "host3")
        assert "--slots is 2; expected no --slots beside hosts" in both.stdout

        said = master.up("--exclude", "host3")
        assert said.returncode == 0, said.stdout
        assert "host3" not in master.det("agent", "list")
        assert master.down().returncode == 0


def test_trial_survives_stopped_rank_killed_supervisor_drained_host(started: MasterOnHosts) -> None:
    experiment = started.create(_slow(2, 150))
    started.wait_for_log(1, "Reported checkpoint")
    host = started.hosts[1]
    rank = max(pid for pid, words in left_on(host).items() if "rank_main" in words)
    host.signal(rank, signal.SIGSTOP)
    started.wait_for_log(1, "host3: stalled: rank 1 is stopped (SIGSTOP) at batch ", within_s=40)
    host.signal(rank, signal.SIGCONT)
    at = len(_losses(started.log_now(1)))
    wait_until(lambda: len(_losses(started.log_now(1))) > at, 30, lambda: started.log(1))
    assert started.log(1).count("Scheduling Trial 1") == 1

    supervisor = host.find("supervisor.py")
    assert supervisor is not None
    host.signal(supervisor, signal.SIGKILL)
    started.wait_for_log(1, "allocation lost: its supervisor was killed on host3", "resumed from checkpoint")
    assert "of 2 restarts" not in started.log(1)

    said = started.det("agent", "disable", "host3", "--drain")
    assert "Tasks still in progress on draining nodes." in said
    second = started.create(_slow(1, 20))
    started.wait_for_state(second, ("COMPLETED",))
    assert "on agent host2\n" in started.log(2)
    started.wait_for_state(experiment, ("COMPLETED",))
    assert "on agent host2, host3\n" in started.log(1)

    waits = started.create(_slow(2, 20))
    started.wait_for_log(3, "needs 2 slots and waits; this master has 1. Enable what is switched off")
    started.det("agent", "enable", "host3")
    started.wait_for_state(waits, ("COMPLETED",))
    assert "on agent host2, host3\n" in started.log(3)


def test_trial_ends_and_resumes_after_frozen_master(started: MasterOnHosts) -> None:
    experiment = started.create(_slow(1))
    started.wait_for_log(1, "Reported checkpoint")
    host = next(one for one in started.hosts if _trials_on(one))
    master = started.machine.find("dstrial.master.server")
    assert master is not None
    started.machine.signal(master, signal.SIGSTOP)
    _wait_until_no_trials(host, 30)
    started.machine.signal(master, signal.SIGCONT)

    started.wait_for_log(1, "allocation lost: ", "resumed from checkpoint")
    started.wait_for_state(experiment, ("COMPLETED",))
    assert "of 2 restarts" not in started.log(1)
