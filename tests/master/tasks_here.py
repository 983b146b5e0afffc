"""A user of tasks: the ``det`` command, an API session, and polling."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import waiting
from det_here import DetHere
from determined.common import api

from dstrial.master.login import USERNAME, new_token
from dstrial.testing.master import MasterForTest

DEADLINE_S = 90.0


class TasksHere:
    """A logged-in user of a running master; ``home`` is an existing directory."""

    def __init__(self, master: MasterForTest, home: Path) -> None:
        self.master = master
        self.home = home
        self.token = new_token(master.record)
        self.session = api.Session(master.address, USERNAME, self.token, None)
        self._det = DetHere(master.address, USERNAME, self.token, home)
        self.ok = self._det.ok
        self.ok_as_admin = DetHere(master.address, "admin", new_token(master.record, "admin"), home).ok
        self.refused = self._det.refused

    def run(self, *words: str, **changes: Any) -> str:
        """Start a command in the background and return its id."""
        options = [f"--config={name}={json.dumps(value)}" for name, value in changes.items()]
        return self.ok("command", "run", "--detach", *options, *words).split()[-1]

    def task(self, text: str, *options: str) -> str:
        """Create a generic task from a config text and return its id."""
        path = self.home / "task.yaml"
        path.write_text(text)
        found = re.search(r"Created task (\S+)", self.ok("task", "create", str(path), *options))
        assert found is not None
        return found[1]

    def command(self, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.session.get(f"api/v1/commands/{task_id}").json()["command"]
        return found

    def tensorboard(self, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.session.get(f"api/v1/tensorboards/{task_id}").json()["tensorboard"]
        return found

    def generic(self, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.session.get(f"api/v1/tasks/{task_id}").json()["task"]
        return {**found, "taskState": found["taskState"].removeprefix("GENERIC_TASK_STATE_")}

    def wait(self, task_id: str, state: str) -> None:
        """Wait until the command has the state."""
        wait_for(lambda: self.command(task_id)["state"] == f"STATE_{state}", f"{task_id} to be {state}")

    def log(self, task_id: str) -> list[str]:
        """Return the lines that the processes of a task have printed."""
        return [line.log.strip() for line in api.task_logs(self.session, task_id) if line.source == "task"]


wait_for = functools.partial(waiting.wait_for, deadline_s=DEADLINE_S)
