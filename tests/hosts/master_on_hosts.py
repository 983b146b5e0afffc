"""A master that runs trials on simulated machines, driven by the ``det`` command."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hosts_runs
import yaml
from machines import Machine, Machines
from waiting import wait_for

_BIN = Path(sys.executable).parent
# One HTTP request per poll: `det` takes 0.5 s of CPU to start, and tests poll hundreds of times.
_ASK = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=30)
connection.request(sys.argv[1], sys.argv[2], sys.argv[3], {"Authorization": "Bearer " + sys.argv[4]})
answer = connection.getresponse()
print(answer.status)
print(answer.read().decode())
"""
_LOGIN = "/api/v1/auth/login"

_TIMEOUT_FACTOR = 2.0  # factor for all timeouts, because other tests load the CPU
CONFIG: dict[str, Any] = {
    **hosts_runs.CONFIG,
    "resources": {"slots_per_trial": 1},
    "hyperparameters": {"zero_stage": 1, "pause_s": 0.0, "micro_batch_size": 2},
}


class MasterOnHosts:
    """A master on the first machine, with the other machines as its hosts.

    Args:
        place: an empty directory that all machines share.
        slots: the number of slots of each host.
        allocation: variables of a Slurm allocation; its nodes are the hosts.
        slurm: variables for Slurm's commands; selects ``--backend slurm``.
        has_ray: whether to use ``--backend ray`` on the Ray cluster of the machines.
        flags: extra flags of ``dstrial up``.
    """

    def __init__(
        self,
        made: Machines,
        place: Path,
        slots: int = 1,
        *,
        allocation: Mapping[str, str] | None = None,
        slurm: Mapping[str, str] | None = None,
        has_ray: bool = False,
        flags: Sequence[str] = (),
    ) -> None:
        self._flags = flags
        self.machine, self.place = made[1], place
        self._allocation = allocation
        self._slurm = slurm
        self._has_ray = has_ray
        self._token = ""
        self.hosts = made.all[1:] if allocation is None and slurm is None and not has_ray else made.all
        self.model = place / "model"
        self.model.mkdir(exist_ok=True)
        hosts_runs.copy_into(self.model, "small_trial.py", "small_pipeline.py")
        hostfile = "".join(f"{machine.name} slots={slots}\n" for machine in self.hosts)
        (place / "hosts").write_text(hostfile)
        (place / "home").mkdir(exist_ok=True)

    @property
    def _environ(self) -> dict[str, str]:
        return {
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": "",
            "PYTHONUNBUFFERED": "1",
            "HOME": str(self.place / "home"),
            "DSTRIAL_STATE_DIR": str(self.place / "state"),
            "DET_MASTER": "http://127.0.0.1:8080",
            **(self._allocation or {}),
            **(self._slurm or {}),
        }

    def command(self, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        return self.machine.run(
            [str(_BIN / words[0]), *words[1:]], cwd=self.place, env=self._environ, timeout=timeout
        )

    def up(self, *flags: str) -> subprocess.CompletedProcess[str]:
        hosts = ["--hostfile", "hosts"] if self._allocation is None else ["--slurm"]
        if self._slurm is not None:
            hosts = ["--backend", "slurm"]
        if self._has_ray:
            hosts = ["--backend", "ray"]
        return self.command("dstrial", "up", *hosts, "--no-password", *self._flags, *flags)

    def down(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self.command("dstrial", "down", *flags, timeout=120)

    def det(self, *words: str) -> str:
        """Run ``det``, which must succeed, and return its output."""
        if words[1:2] in (("enable",), ("disable",)):
            assert self.command("dstrial", "login", "--user", "admin").returncode == 0
            words = ("-u", "admin", *words)
        done = self.command("det", *words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def json(self, *words: str) -> Any:
        """Run ``det … --json`` and return the parsed output."""
        text = self.det(*words, "--json")
        return json.loads(text[min(at for at in (text.find("["), text.find("{")) if at >= 0) :])

    def write(self, changes: Mapping[str, Any]) -> tuple[str, str]:
        """Write a config; return the arguments of ``det experiment create``."""
        (self.place / "exp.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
        return "exp.yaml", "model"

    def refused(self, changes: Mapping[str, Any], text: str) -> str:
        """Submit an experiment that must be rejected with the text; return the output."""
        before = self.det("experiment", "list", "--csv")
        done = self.command("det", "experiment", "create", *self.write(changes))
        assert done.returncode != 0, done.stdout
        assert done.stdout.count(text) == 1, done.stdout
        assert self.det("experiment", "list", "--csv") == before
        return done.stdout.strip()

    def create(self, changes: Mapping[str, Any]) -> int:
        """Submit an experiment and return its id."""
        said = self.det("experiment", "create", *self.write(changes))
        return int(said.split("Created experiment ")[1].split()[0])

    def train(self, batches: int, pause_s: float = 0.05, **changes: Any) -> tuple[int, int]:
        """Submit one trial; return (experiment id, trial id) after its 15th batch."""
        experiment = self.create(
            {
                "hyperparameters": {**CONFIG["hyperparameters"], "pause_s": pause_s},
                "searcher": {**CONFIG["searcher"], "max_length": {"batches": batches}},
                **changes,
            }
        )
        (trial,) = self.wait_for_trials(experiment, 1)
        self.wait_for_log(trial["id"], "batch 15 loss", within_s=120)
        return experiment, int(trial["id"])

    def trials(self, experiment_id: int) -> list[dict[str, Any]]:
        text = self.det("experiment", "list-trials", str(experiment_id), "--csv")
        return [{**row, "id": int(row["Trial ID"])} for row in csv.DictReader(io.StringIO(text))]

    def wait_for_trials(self, experiment_id: int, num: int) -> list[dict[str, Any]]:
        wait_until(
            lambda: len(self.trials(experiment_id)) >= num, 60, lambda: str(self.trials(experiment_id))
        )
        return self.trials(experiment_id)

    def state(self, experiment_id: int) -> str:
        return str(self.json("experiment", "describe", str(experiment_id))[0]["experiment"]["state"])

    def _state(self, experiment_id: int) -> str:
        answer = self._ask("GET", f"/api/v1/experiments/{experiment_id}")
        return str(json.loads(answer)["experiment"]["state"]).removeprefix("STATE_") if answer else ""

    def _ask(self, method: str, path: str, body: str = "") -> str:
        """Return the body of the master's response; "" unless its status is 200."""
        words = [sys.executable, "-I", "-S", "-c", _ASK, method, path, body, self._token]
        done = self.machine.run(words, cwd="/")
        status, _, text = done.stdout.partition("\n")
        if status == "401" and path != _LOGIN:
            said = self._ask("POST", _LOGIN, json.dumps({"username": "determined", "password": ""}))
            self._token = str(json.loads(said)["token"])
            return self._ask(method, path, body)
        assert done.returncode or status == "200" or path != _LOGIN, done.stdout
        return text if status == "200" else ""

    def log(self, trial_id: int) -> str:
        return self.det("trial", "logs", str(trial_id))

    def log_now(self, trial_id: int) -> str:
        """Return a trial's log by HTTP, which is faster than ``det trial logs``."""
        lines = self._ask("GET", f"/api/v1/trials/{trial_id}/logs").splitlines()
        return "".join(json.loads(line)["result"]["message"] for line in lines if line)

    def batches(self, trial_id: int) -> list[int]:
        """Return the batch numbers in a trial's log, without repeats in succession."""
        found = hosts_runs.batches(self.log(trial_id))
        return [number for number, before in zip(found, [0, *found], strict=False) if number != before]

    def steps(self, trial_id: int, *, is_all: bool = False) -> list[int]:
        """Return the steps of training reports; ``is_all`` includes archived reports.

        Reports are archived if a resume repeats their batches.
        """
        path = self.place / "state" / "master.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT steps FROM metrics WHERE trial_id = ? AND group_name = 'training' AND (archived = 0 OR ?) "
                "ORDER BY steps",
                (trial_id, is_all),
            ).fetchall()
        return [steps for (steps,) in rows]

    def kill(self) -> None:
        """Kill the master process by SIGKILL."""
        pid = self.machine.find("dstrial.master.server")
        assert pid is not None
        self.machine.signal(pid, signal.SIGKILL)

    def enabled(self) -> dict[str, bool]:
        return {agent["id"]: agent["enabled"] for agent in self.json("agent", "list")}

    def wait_for_log(self, trial_id: int, *texts: str, within_s: float = 60.0) -> float:
        """Wait until a trial's log contains all texts; return the seconds waited."""
        began_s = time.monotonic()

        def is_there() -> bool:
            log = self.log_now(trial_id)
            return all(text in log for text in texts)

        wait_until(is_there, within_s, lambda: f"{texts} not in {self.log(trial_id)}")
        return time.monotonic() - began_s

    def wait_for_state(self, experiment_id: int, states: Sequence[str], within_s: float = 120.0) -> None:
        wait_until(
            lambda: self._state(experiment_id) in states,
            within_s,
            lambda: (
                f"{self.state(experiment_id)}: {[self.log(one['id']) for one in self.trials(experiment_id)]}"
            ),
        )


def wait_until(is_so: Callable[[], bool], within_s: float, why: Callable[[], str]) -> None:
    """Wait until ``is_so()`` is true; on a timeout, fail with the text of ``why()``."""
    wait_for(is_so, why, deadline_s=_TIMEOUT_FACTOR * within_s)


def left_on(machine: Machine) -> dict[int, str]:
    """Return pid -> command line on a host, without sshd and the master's agent."""
    return {pid: words for pid, words in machine.processes().items() if "hosts.agent" not in words}
