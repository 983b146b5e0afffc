"""Real TensorBoards behind the proxy show the event files of running trials."""

from __future__ import annotations

import http.client
import json
import re
import webbrowser
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
from submitting import config, processes_with, submit, trials, wait_until
from tasks_here import DEADLINE_S, TasksHere, wait_for

from dstrial.testing.master import MasterForTest

pytestmark = pytest.mark.process

TRAIN = """
import time
import determined as det
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

info = det.get_cluster_info()
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    writer = EventFileWriter(str(core.train.get_tensorboard_path()))
    for step in range(1, info.trial.hparams["steps"] + 1):
        value = Summary.Value(tag="Determined/loss", simple_value=1 / step)
        writer.add_event(Event(step=step, wall_time=time.time(), summary=Summary(value=[value])))
        writer.flush()
        core.train.upload_tensorboard_files()
        core.train.report_validation_metrics(step, {"score": step})
        if core.preempt.should_preempt():
            break
        time.sleep(0.2)
    writer.close()
    time.sleep(1.1)
    core.train.upload_tensorboard_files()
"""


class Viewer(TasksHere):
    """A user of the ``det`` command who also opens pages of the master."""

    def start(self, *words: str) -> str:
        """Start a TensorBoard, wait until it is ready, and return its id."""
        found = re.search(r"id: ([0-9a-f-]{36})\) is ready", self.ok("tensorboard", "start", *words))
        assert found is not None
        return found[1]

    def browse(self, path: str, cookie: str | None = None) -> tuple[int, str, str]:
        """GET a path with the token or a cookie; return status, location and content."""
        port = self.master.record.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        headers = {
            "Host": f"localhost:{port}",
            "Accept": "text/html,*/*",
            **({"Cookie": f"auth={cookie}"} if cookie else {"Authorization": f"Bearer {self.token}"}),
        }
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        content = answer.read().decode(errors="replace")
        connection.close()
        return answer.status, answer.getheader("Location") or "", content

    def steps(self, task_id: str, run: str) -> list[int]:
        """Return the steps of a run that a TensorBoard shows."""
        asked = f"tag={quote('Determined/loss', safe='')}&run={quote(run, safe='')}"
        status, _, content = self.browse(f"/proxy/{task_id}/data/plugin/scalars/scalars?{asked}")
        return [int(step) for _, step, _ in json.loads(content)] if status == 200 else []


@pytest.fixture
def viewer(task_master: MasterForTest, tmp_path: Path) -> Viewer:
    return Viewer(task_master, tmp_path)


def test_tensorboard_shows_running_trials_and_survives_master(
    viewer: Viewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, gate = viewer.master, tmp_path / "gate"
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    long_id = submit(master, config(hyperparameters={"steps": 10_000}), TRAIN)
    (long_trial,) = trials(master, long_id)
    run = f"experiment-{long_id}/trial/{long_trial['id']}"

    # The client waits until the TensorBoard is ready, and opens a page that redirects to it.
    task_id = viewer.start(str(long_id))
    assert viewer.tensorboard(task_id)["experimentIds"] == [long_id]
    url = urlsplit(opened[0])
    assert viewer.browse(f"{url.path}?{url.query}")[:2] == (307, f"/proxy/{task_id}/")
    status, _, page = viewer.browse(f"/proxy/{task_id}/")
    assert (status, "The TensorFlow Authors" in page) == (200, True)
    assert "Log in" in viewer.browse(f"/proxy/{task_id}/", "wrong")[2]

    # New data of a running trial appears in the TensorBoard.
    wait_for(lambda: viewer.steps(task_id, run), "the first steps of the running trial")
    before = viewer.steps(task_id, run)[-1]
    wait_for(lambda: viewer.steps(task_id, run)[-1] > before, "further steps of the running trial")
    assert "TERMINATED" not in viewer.ok("tensorboard", "list")
    assert task_id in viewer.ok("task", "list")
    assert "TensorBoard" in viewer.ok("tensorboard", "logs", task_id)
    assert "idle_timeout" in viewer.ok("tensorboard", "config", task_id)
    viewer.ok("tensorboard", "open", task_id)
    assert opened[1] == opened[0]

    # The TensorBoard and a command survive the death of the master; its successor finds both.
    (process,) = processes_with(f"--path_prefix=/proxy/{task_id}")
    waiting = f"echo one; while [ ! -e {gate} ]; do sleep 0.05; done; echo two; exit 4"
    held = viewer.run(waiting, **{"resources.slots": 0})
    wait_for(lambda: viewer.log(held) == ["one"], "its first line")
    master.kill()
    gate.touch()
    master.up()
    viewer.wait(held, "TERMINATED")
    assert (viewer.log(held), viewer.command(held)["exitStatus"]) == (["one", "two"], "exited with code 4")
    wait_for(lambda: viewer.steps(task_id, run)[-1] > before, "the steps after the master's death")
    assert processes_with(f"--path_prefix=/proxy/{task_id}") == [process]

    viewer.ok("tensorboard", "kill", task_id)
    wait_for(lambda: viewer.tensorboard(task_id)["state"] == "STATE_TERMINATED", "its end")
    assert processes_with(f"--path_prefix=/proxy/{task_id}") == []
    assert "has ended" in viewer.browse(f"{url.path}?{url.query}")[2]
    assert "Tensorboard has ended" in viewer.refused("tensorboard", "open", task_id)
    viewer.ok("experiment", "kill", str(long_id))
    wait_until(master, long_id, "CANCELED")

    # ``dstrial down`` ends commands for good; a pausable task runs again under the next master.
    command = viewer.run("sleep", "600", **{"resources.slots": 0})
    task = viewer.task("entrypoint: echo begun; sleep 600\nresources: {slots: 0}\n")
    wait_for(lambda: viewer.log(task) == ["begun"], "the task")
    assert master.dstrial("down").returncode == 0
    master.up()
    assert viewer.command(command)["exitStatus"] == "allocation terminated: the master is going down"
    wait_for(lambda: viewer.log(task) == ["begun", "begun"], "the task's second run")
    viewer.ok("task", "kill", task)


def test_tensorboard_of_trials_ends_when_idle(viewer: Viewer) -> None:
    master = viewer.master
    search = {"name": "random", "metric": "score", "max_trials": 2}
    done_id = submit(master, config(hyperparameters={"steps": 2}, searcher=search), TRAIN)
    wait_until(master, done_id, "COMPLETED")
    first, second = (trial["id"] for trial in trials(master, done_id))

    unseen = viewer.ok(
        "tensorboard", "start", str(done_id), "--detach", "--config", "idle_timeout=1s"
    ).split()[-1]
    task_id = viewer.start("--trial-ids", str(second), "--no-browser")

    wait_for(lambda: viewer.steps(task_id, f"trial-{second}") == [1, 2], "the trial's steps")
    assert viewer.steps(task_id, f"trial-{first}") == []
    assert json.loads(viewer.browse(f"/proxy/{task_id}/data/runs")[2]) == [f"trial-{second}"]
    viewer.ok("tensorboard", "set", "priority", task_id, "7")
    assert "priority: 7" in viewer.ok("tensorboard", "config", task_id)
    viewer.ok("tensorboard", "kill", task_id)
    for ended, why in (
        (task_id, "allocation killed: a user has killed it"),
        (unseen, "it was not used for 1 s"),
    ):
        wait_for(lambda ended=ended: viewer.tensorboard(ended)["state"] == "STATE_TERMINATED", "its end")  # type: ignore[misc]
        assert why in viewer.tensorboard(ended)["exitStatus"]
    assert "experiment 999 is not found" in viewer.refused("tensorboard", "start", "999")
    assert "trial 999 is not found" in viewer.refused("tensorboard", "start", "-t", "999")
