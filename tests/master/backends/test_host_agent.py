"""The agent on a remote host, driven through the master's protocol."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rows import allocation_request
from waiting import wait_for

from dstrial.hosts.hostfile import Host
from dstrial.hosts.remote import PREFIX
from dstrial.hosts.transport import BEAT_S, GOODBYE, LEASE_S, Transport, remote_words
from dstrial.master.backends import local
from dstrial.master.backends.hosts import agent
from dstrial.master.backends.hosts.link import AgentSettings, HostLink, RemoteRun

pytestmark = pytest.mark.process
_NAME = "1.x.1"
_LATE_S = 5.0


class _Agent:
    """An agent process whose heartbeats are answered until ``close_input()``."""

    def __init__(self, place: Path, live: list[str], *, has_actor: bool = False) -> None:
        """Start the agent; with ``has_actor``, as a child of ``process``, as on Ray."""
        self._place = place
        actor = [sys.executable, "-c", "import subprocess, sys; subprocess.call(sys.argv[1:])"]
        self.process = subprocess.Popen(
            [*(actor if has_actor else ()), sys.executable, "-u", "-m", agent.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DSTRIAL_STATE_DIR": str(place)},
        )
        self.said: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.send({
            "host": "here", "cluster_id": "c", "slots": [0], "is_warm": False,
            "ends_with_parent": has_actor, "forks_with_accelerators": False,
            "warm_idle_timeout_s": 1, "live": live, "umask": None,
        })  # fmt: skip
        self._reader = threading.Thread(target=self._answer)
        self._reader.start()
        self.wait_for("hello")

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with self._lock, contextlib.suppress(ValueError, BrokenPipeError):
            print(json.dumps(message), file=self.process.stdin, flush=True)

    def _answer(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            frame = json.loads(line.removeprefix(PREFIX))
            if "beat" in frame:
                self.send({"beat": frame["beat"]})
            self.said.append(frame)

    def wait_for(self, key: str) -> dict[str, Any]:
        def find() -> list[dict[str, Any]]:
            return [frame for frame in self.said if key in frame]

        wait_for(find, lambda: self.said, deadline_s=30)
        return find()[0]

    def submit(self, entrypoint: str) -> None:
        request = allocation_request(self._place, entrypoint=entrypoint)
        self.send({"do": "submit", "id": _NAME, "slots": [0], "request": request.to_json()})
        self.wait_for("pid")

    def wait_for_supervisor(self) -> local.SupervisorHandle:
        wait_for(lambda: self.supervisor, deadline_s=30)
        found = self.supervisor
        assert found is not None
        return found

    def wait_until_trial_ends(self, deadline_s: float) -> None:
        wait_for(lambda: self.supervisor is None, deadline_s=deadline_s)

    @property
    def supervisor(self) -> local.SupervisorHandle | None:
        return local.find(self._place / "hosts" / "c" / "here" / "allocations" / _NAME)

    def close_input(self, last_words: str = "") -> None:
        assert self.process.stdin is not None
        with self._lock:
            self.process.stdin.write(last_words)
            self.process.stdin.close()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        directory = self._place / "hosts" / "c" / "here" / "allocations" / _NAME
        local.kill(self.supervisor, directory, leaves_record=False)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def _agent(place: Path, *live: str, has_actor: bool = False) -> Iterator[_Agent]:
    agent = _Agent(place, [*live], has_actor=has_actor)
    try:
        yield agent
    finally:
        agent.close()


def test_agent_sends_output_and_exit_code(tmp_path: Path) -> None:
    with _agent(tmp_path) as agent:
        agent.submit("echo printed; exit 4")
        exit_ = agent.wait_for("exit_code")
    assert (exit_["id"], exit_["exit_code"]) == (_NAME, 4)
    assert any(frame.get("file") == "output.log" for frame in agent.said)


def test_trial_survives_master_exit_but_not_lost_connection(tmp_path: Path) -> None:
    """After a lost connection the master restarts the trial on another host."""
    with _agent(tmp_path / "lost") as lost, _agent(tmp_path / "left") as left:
        for agent in (lost, left):
            agent.submit("sleep 300")
        lost.wait_for_supervisor()
        before = left.wait_for_supervisor()
        time.sleep(2)  # long enough for some heartbeats
        lost.close_input()
        left.close_input(
            f'{{"do": "submit", "requ\n{GOODBYE}\n'
        )  # the master was killed in the middle of a line
        assert left.process.wait(10) == 0
        began_s = time.monotonic()
        lost.wait_until_trial_ends(LEASE_S + _LATE_S)
        assert lost.process.wait(_LATE_S) == 1
        time.sleep(max(began_s + LEASE_S + 2 - time.monotonic(), 0))
        assert left.supervisor == before
        with _agent(tmp_path / "left", _NAME) as successor:
            assert successor.wait_for("hello")["hello"] == {
                _NAME: {"pid": before.pid, "start_time": before.start_time}
            }


def test_agent_kill_ends_trial_within_lease(tmp_path: Path) -> None:
    with _agent(tmp_path) as agent:
        agent.submit("sleep 300")
        agent.wait_for_supervisor()
        agent.process.kill()
        agent.wait_until_trial_ends(LEASE_S + _LATE_S)


def test_trial_on_ray_ends_with_actor(tmp_path: Path) -> None:
    with _agent(tmp_path, has_actor=True) as agent:
        agent.submit("sleep 300")
        agent.wait_for_supervisor()
        agent.process.kill()
        agent.wait_until_trial_ends(_LATE_S)


class _Here(Transport):
    """Starts agents on this machine."""

    connect_s = 30.0
    other_error = ("not starting an agent", "")

    def words(self, host: str, python: str) -> list[str]:
        del host
        return remote_words(python)


@pytest.mark.parametrize("is_cut", [False, True])
def test_lose_all_keeps_runs_on_silent_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """After its job ends, a run on a silent host lives until its lease expires."""
    monkeypatch.setenv("DSTRIAL_STATE_DIR", str(tmp_path))
    settings = AgentSettings(sys.executable, "c", 9, None, False, False, 1.0, _Here())
    link = HostLink(1, Host("here", (0,)), settings, lambda: None)
    link.start()
    try:
        assert link.has_tried.wait(30)
        assert link.node().why_down is None
        link.recover(_NAME, RemoteRun(tmp_path, None, (0,), "rank 0"))
        if is_cut:
            agent = json.loads((tmp_path / "hosts" / "c" / "here" / "agent.json").read_text())
            os.kill(int(agent["pid"]), signal.SIGSTOP)
            time.sleep(2 * BEAT_S + 0.5)
        link.lose_all("the job is over")
        run = link.run(_NAME)
        assert run is not None
        assert (run.exit is None) == is_cut
    finally:
        link.close(for_good=True)
