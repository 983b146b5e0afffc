"""Effects, exit codes and output of the real ``det`` command and SDK."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm_start
import yaml
from waiting import wait_for

from dstrial.master.login import USERNAME
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

TRAIN = """
import json, time
import determined as det

info = det.get_cluster_info()
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    done = 0
    if info.latest_checkpoint is not None:
        with core.checkpoint.restore_path(info.latest_checkpoint) as path:
            done = json.loads((path / "state.json").read_text())
    while done < info.trial.hparams["steps"]:
        time.sleep(info.trial.hparams["sleep"])
        done += 1
        print("WARNING: batch", done)
        core.train.report_training_metrics(done, {"loss": 1 / done})
        core.train.report_validation_metrics(done, {"score": 1 / done, "batches": done})
        with core.checkpoint.store_path({"steps_completed": done}) as (path, _):
            (path / "state.json").write_text(json.dumps(done))
        if core.preempt.should_preempt():
            break
"""


class Det:
    """A master, a context directory, and the ``det`` command."""

    def __init__(self, master: MasterForTest, directory: Path) -> None:
        self.master = master
        self.directory = directory
        self.context = directory / "context"
        self.context.mkdir()
        (self.context / "train.py").write_text(TRAIN)
        self.short = self.config("short", {"steps": 3, "sleep": 0.0})
        self.long = self.config("long", {"steps": 600, "sleep": 0.5})

    def config(self, name: str, hyperparameters: dict[str, object]) -> Path:
        given = {
            "name": name,
            "entrypoint": "python3 train.py",
            "hyperparameters": hyperparameters,
            "searcher": {"name": "single", "metric": "score"},
            "max_restarts": 0,
            "checkpoint_storage": {"save_trial_latest": 2},
        }
        path = self.directory / f"{name}.yaml"
        path.write_text(yaml.safe_dump(given))
        return path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.master.det(*words, cwd=self.directory)

    def type(self, text: str, *words: str) -> subprocess.CompletedProcess[str]:
        return typed(self.master, text, *words)

    def ok(self, *words: str) -> str:
        return self._good(self.run(*words))

    def ok_as_admin(self, *words: str) -> str:
        return self._good(self.type(f"{self.master.password('admin')}\n", "-u", "admin", *words))

    @staticmethod
    def _good(done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def refused(self, *words: str) -> str:
        done = self.run(*words)
        assert done.returncode == 1, done.stdout
        return done.stderr

    def create(self, config: Path, *options: str) -> int:
        return created(self.ok("e", "create", *options, str(config), str(self.context)))

    def get(self, path: str) -> Any:
        return self.master.client().get(f"/api/v1/{path}")

    def experiment(self, experiment_id: int) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"experiments/{experiment_id}")["experiment"]
        return found

    def wait(self, experiment_id: int, state: str) -> None:
        wait_for(lambda: self.experiment(experiment_id)["state"] == f"STATE_{state}", f"it is not {state}")

    def settle(self, experiment_id: int, state: str) -> None:
        """Wait until an experiment has a state, and check that it keeps it for a second."""
        self.wait(experiment_id, state)
        time.sleep(1.0)
        assert self.experiment(experiment_id)["state"] == f"STATE_{state}"

    def trial(self, experiment_id: int) -> int:
        return int(self.get(f"experiments/{experiment_id}/trials")["trials"][0]["id"])

    def checkpoints(self, experiment_id: int) -> dict[str, str]:
        found = self.get(f"experiments/{experiment_id}/checkpoints")["checkpoints"]
        return {one["uuid"]: one["state"].removeprefix("STATE_") for one in found}

    def completed(self, experiment_id: int) -> list[str]:
        return [uuid for uuid, state in self.checkpoints(experiment_id).items() if state == "COMPLETED"]


def typed(master: MasterForTest, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command that prompts; without a terminal, even passwords come from stdin."""
    return warm_start.run_command(
        [sys.executable, "-m", "determined.cli", *words],
        env=dict(master.env), input=text, start_new_session=True,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def created(text: str) -> int:
    [number] = re.findall(r"Created experiment (\d+)", text)
    return int(number)


@pytest.fixture(scope="module")
def det(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Det]:
    directory = tmp_path_factory.mktemp("det")
    with master_for_test(directory, num_slots=2) as master:
        yield Det(master, directory)


@pytest.fixture(scope="module")
def followed(det: Det) -> str:
    """Output of ``det e create -f`` for an experiment."""
    return det.ok("e", "create", str(det.short), str(det.context), "-f")


@pytest.fixture(scope="module")
def ended(det: Det, followed: str) -> int:
    """Id of the experiment of ``followed``, completed; tests only read it."""
    experiment_id = created(followed)
    det.wait(experiment_id, "COMPLETED")
    return experiment_id


@pytest.fixture(scope="module")
def paused(det: Det) -> int:
    """Id of a paused experiment that has never run."""
    return det.create(det.long, "--paused")


def test_create_follows_log_to_end(followed: str) -> None:
    assert "WARNING: batch 3" in followed
    assert "Trial log stream ended" in followed


def test_create_accepts_paused_config_and_include(det: Det) -> None:
    extra = det.directory / "extra.txt"
    extra.write_text("more")

    experiment_id = det.create(det.short, "--paused", "--config", "name=other", "-i", str(extra))

    assert det.experiment(experiment_id)["state"] == "STATE_PAUSED"
    assert det.experiment(experiment_id)["name"] == "other"
    det.ok("e", "download-model-def", str(experiment_id), "--output-dir", str(det.directory))
    with tarfile.open(det.directory / f"experiment_{experiment_id}_model_def.tgz") as archive:
        assert {"train.py", "extra.txt"} <= set(archive.getnames())


def test_create_skips_ignored_files_and_marked_directories(det: Det) -> None:
    context, extra = det.directory / "ignoring", det.directory / "extra"
    for name in (
        *("train.py", "kept.txt", "notes.secret", "data/large.bin", "own/x.py"),
        *(".venv/pyvenv.cfg", ".venv/bin/x", "runs/.dstrial-output", "runs/x/log"),
    ):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_text("x")
    (context / ".detignore").write_text("*.secret\ndata/\n")
    extra.mkdir()
    (extra / "inner.txt").write_text("x")

    text = det.ok("e", "create", "--paused", str(det.short), str(context), "-i", str(extra))

    tgz = base64.b64decode(det.get(f"experiments/{created(text)}/model_def")["b64Tgz"])
    with tarfile.open(fileobj=io.BytesIO(tgz)) as archive:
        names = {member.name for member in archive if member.isfile()}
    assert names == {"train.py", "kept.txt", "own/x.py", "extra/inner.txt"}


def test_create_in_test_mode_succeeds(det: Det) -> None:
    assert "Model definition test succeeded" in det.ok(
        "e", "create", "--test-mode", str(det.short), str(det.context)
    )


def test_invalid_config_is_refused_with_every_problem(det: Det) -> None:
    wrong = det.directory / "wrong.yaml"
    wrong.write_text("nmae: x\nentrypoint: true\nsearcher: {name: asha, metric: loss}\n")

    said = det.refused("e", "create", str(wrong), str(det.context))

    assert "Write name instead" in said
    assert "async_halving" in said


def test_list_prints_table_and_csv(det: Det, ended: int) -> None:
    assert re.search(rf"{ended} \| determined .*short.*COMPLETED", det.ok("e", "list"))
    rows = list(csv.DictReader(det.ok("e", "list", "--all", "--csv").splitlines()))
    assert str(ended) in [row["ID"] for row in rows]


def test_describe_prints_json_text_and_csv(det: Det, ended: int) -> None:
    [described] = json.loads(det.ok("e", "describe", str(ended), "--json"))
    assert described["experiment"]["id"] == ended
    text = det.ok("e", "describe", str(ended), "--metrics")
    assert "score" in text
    assert "loss" in text
    (det.directory / "csv").mkdir()
    det.ok("e", "describe", str(ended), "--metrics", "--outdir", str(det.directory / "csv"))
    with (det.directory / "csv" / "workloads.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3


def test_logs_filter_by_position_level_and_source(det: Det, ended: int) -> None:
    everything = det.ok("e", "logs", str(ended)).splitlines()
    assert det.ok("e", "logs", str(ended), "--head", "2").splitlines()[:2] == everything[:2]
    tail = [line for line in det.ok("e", "logs", str(ended), "--tail", "2").splitlines() if "||" in line]
    assert tail == [line for line in everything if "||" in line][-2:]
    warnings = det.ok("e", "logs", str(ended), "--level", "WARNING")
    assert "batch 3" in warnings
    assert "Scheduling" not in warnings
    assert "batch 3" in det.ok(
        "trial", "logs", str(det.trial(ended)), "--source", "task", "--stdtype", "stdout"
    )
    assert "batch" not in det.ok("e", "logs", str(ended), "--source", "master").replace("batches", "")


def test_logs_filter_by_agent_time_and_rank(det: Det, ended: int) -> None:
    trial_id = str(det.trial(ended))
    lines = json.loads(
        "[" + det.ok("trial", "logs", trial_id, "--json").rpartition("}")[0].replace("}\n{", "},{") + "}]"
    )
    middle = next(line["timestamp"] for line in lines if line["log"] == "batch 2\n")
    [container] = {line["containerId"] for line in lines}
    [agent] = {line["agentId"] for line in lines}

    def logs(*words: str) -> list[str]:
        return [line for line in det.ok(*words).splitlines() if "||" in line]

    def wanted(condition: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [line["message"].rstrip("\n") for line in lines if condition(line)]

    everything = wanted(lambda _line: True)
    assert logs("trial", "logs", trial_id, "--agent-id", agent, "--container-id", container) == everything
    assert logs("trial", "logs", trial_id, "--agent-id", "nobody") == []
    assert logs("e", "logs", str(ended), "--timestamp-before", middle) == wanted(
        lambda line: line["timestamp"] < middle
    )
    assert logs("e", "logs", str(ended), "--timestamp-after", middle, "--source", "task") == wanted(
        lambda line: line["timestamp"] > middle and line["source"] == "task"
    )
    assert logs(
        "e", "logs", str(ended), "--rank-id", "-1", "--rank-id", "3", "--stdtype", "stdout"
    ) == wanted(lambda line: line["stdtype"] == "stdout")
    task_id = det.get(f"trials/{trial_id}")["trial"]["taskId"]
    assert logs("task", "logs", task_id, "--source", "master", "--container-id", container) == wanted(
        lambda line: line["source"] == "master"
    )
    assert logs("task", "logs", task_id, "-f") == everything
    [last] = json.loads(f"[{det.ok('task', 'logs', task_id, '--tail', '1', '--json').rpartition('}')[0]}}}]")
    assert last["message"].rstrip("\n") == everything[-1]
    assert last["taskId"] == task_id


def test_invalid_logs_requests_are_refused(det: Det, ended: int) -> None:
    said = det.refused("e", "logs", str(ended), "--timestamp-after", "yesterday")
    assert "timestampAfter is 'yesterday'; expected a time" in said
    assert "trial 999999 is not found" in det.refused("trial", "logs", "999999")


def test_wait_exit_code_reports_outcome(det: Det, ended: int) -> None:
    assert det.run("e", "wait", str(ended)).returncode == 0
    experiment_id = det.create(det.config("failing", {}))
    det.refused("e", "wait", "--polling-interval", "1", str(experiment_id))


def test_pause_activate_cancel_update_slots(det: Det) -> None:
    experiment_id = det.create(det.long)
    det.wait(experiment_id, "RUNNING")
    assert f"Experiment {experiment_id}" in det.ok("slot", "list")
    assert f"Experiment {experiment_id}" in det.ok("task", "list")
    assert f"{experiment_id}" in det.ok("job", "list")
    det.ok("e", "pause", str(experiment_id))
    det.wait(experiment_id, "PAUSED")
    wait_for(lambda: f"Experiment {experiment_id}" not in det.ok("slot", "list"))
    det.ok("e", "activate", str(experiment_id))
    det.wait(experiment_id, "RUNNING")
    det.ok("e", "cancel", str(experiment_id))
    det.wait(experiment_id, "CANCELED")


def test_archive_unarchive_and_delete_change_list(det: Det) -> None:
    experiment_id = det.create(det.short)
    det.wait(experiment_id, "COMPLETED")
    det.ok("e", "archive", str(experiment_id))
    assert f" {experiment_id} |" not in det.ok("e", "list")
    assert f" {experiment_id} |" in det.ok("e", "list", "--all")
    det.ok("e", "unarchive", str(experiment_id))
    det.ok("e", "delete", "--yes", str(experiment_id))
    wait_for(lambda: f" {experiment_id} |" not in det.ok("e", "list", "--all"))


def test_unfinished_experiment_cannot_be_archived_or_deleted(det: Det, paused: int) -> None:
    for verb in (["archive"], ["delete", "--yes"]):
        assert "expected one that has ended" in det.refused("e", *verb, str(paused))


def test_continue_accepts_changed_config(det: Det) -> None:
    experiment_id = det.create(det.short, "--config", "hyperparameters.sleep=0.01")
    det.wait(experiment_id, "COMPLETED")

    det.ok("e", "continue", str(experiment_id), "--config", "hyperparameters.steps=5", "-f")

    det.wait(experiment_id, "COMPLETED")
    assert det.get(f"trials/{det.trial(experiment_id)}")["trial"]["totalBatchesProcessed"] == 5


def test_labels_and_settings_can_be_changed(det: Det, paused: int) -> None:
    number = str(paused)
    det.ok("e", "label", "add", number, "mine")
    det.ok("e", "set", "name", number, "renamed")
    det.ok("e", "set", "description", number, "described")
    det.ok("e", "set", "max-slots", number, "1")
    det.ok("e", "set", "priority", number, "7")
    det.ok("e", "set", "weight", number, "2.5")
    det.ok("e", "set", "gc-policy", "--yes", "--save-experiment-best", "1", "--save-trial-best", "2",
           "--save-trial-latest", "3", number)  # fmt: skip

    shown = det.experiment(int(number))
    assert (shown["name"], shown["description"], shown["labels"]) == ("renamed", "described", ["mine"])
    config = yaml.safe_load(det.ok("e", "config", number))
    assert (config["resources"]["max_slots"], config["resources"]["priority"]) == (1, 7)
    assert config["checkpoint_storage"]["save_trial_latest"] == 3
    det.ok("e", "label", "remove", number, "mine")
    assert det.experiment(int(number))["labels"] == []


def test_trials_and_checkpoints_are_listed(det: Det, ended: int) -> None:
    trial_id = det.trial(ended)
    assert re.search(rf" {trial_id} \| COMPLETED", det.ok("e", "list-trials", str(ended)))
    assert "COMPLETED" in det.ok("e", "list-checkpoints", str(ended))
    described = json.loads(det.ok("trial", "describe", str(trial_id), "--json", "--metrics"))
    assert described["trial"]["totalBatchesProcessed"] == 3
    assert {next(kind for kind in one if one[kind]) for one in described["workloads"]} == {
        "training", "validation", "checkpoint",
    }  # fmt: skip


def test_trial_describe_prints_csv_and_table(det: Det, ended: int) -> None:
    trial_id = str(det.trial(ended))
    text = det.ok("trial", "describe", trial_id, "--csv")
    rows = list(csv.DictReader(text.partition("Workloads:\n")[2].splitlines(keepends=True)))
    assert [row["# of Batches"] for row in rows] == ["1", "1", "1", "2", "2", "2", "3", "3", "3"]
    assert [json.loads(row["Validation Metrics"])["avgMetrics"]["batches"] for row in rows[1::3]] == [1, 2, 3]
    assert {row["Checkpoint"] for row in rows[2::3]} <= {"COMPLETED", "DELETED"}
    text = det.ok("trial", "describe", trial_id, "--metrics-summary")
    assert f" {ended} | COMPLETED " in text
    assert '"validation_metrics": {' in text


def test_checkpoints_are_described_and_downloaded(det: Det, ended: int) -> None:
    uuid = det.completed(ended)[-1]
    assert uuid in det.ok("checkpoint", "describe", uuid)
    for mode in ("direct", "master"):
        target = det.directory / f"download-{mode}"
        det.ok("checkpoint", "download", uuid, "--mode", mode, "-o", str(target))
        assert json.loads((target / "state.json").read_text()) == 3
    det.ok("e", "download", str(ended), "--top-n", "1", "-o", str(det.directory / "best"))
    assert list((det.directory / "best").rglob("state.json"))
    det.ok("trial", "download", str(det.trial(ended)), "--latest", "-o", str(det.directory / "latest"))
    assert list((det.directory / "latest").rglob("state.json"))
    best = det.directory / "best-of-trial"
    done = det.ok("trial", "download", str(det.trial(ended)), "--best", "-q", "-o", str(best))
    assert done.splitlines()[-1] == str(best)
    assert (best / "state.json").exists()


def test_checkpoints_are_deleted_fully_or_partially(det: Det) -> None:
    experiment_id = det.create(det.short)
    det.wait(experiment_id, "COMPLETED")
    wait_for(lambda: len(det.completed(experiment_id)) == 2)
    first, second = det.completed(experiment_id)

    det.ok("checkpoint", "rm", "--yes", first, "--glob", "state.json")
    det.ok("checkpoint", "delete", "--yes", second)

    wanted = {first: "PARTIALLY_DELETED", second: "DELETED"}
    wait_for(lambda: wanted.items() <= det.checkpoints(experiment_id).items())


def test_checkpoint_rm_refreshes_manually_removed_files(det: Det) -> None:
    experiment_id = det.create(det.short, "-f")
    uuid = det.completed(experiment_id)[-1]
    (det.master.state.path / "checkpoints" / uuid / "state.json").unlink()

    assert "refreshing resources" in det.ok("checkpoint", "rm", "--yes", uuid)

    wait_for(lambda: det.checkpoints(experiment_id)[uuid] == "PARTIALLY_DELETED")
    assert set(det.get(f"checkpoints/{uuid}")["checkpoint"]["resources"]) == {"metadata.json"}


def test_gc_policy_announces_and_performs_deletions(det: Det) -> None:
    experiment_id = det.create(det.short, "--config", "checkpoint_storage.save_trial_latest=3", "-f")
    det.wait(experiment_id, "COMPLETED")
    [one, two, three] = det.completed(experiment_id)

    done = det.type("y\n", "e", "set", "gc-policy", "--save-experiment-best", "0", "--save-trial-best", "1",
                    "--save-trial-latest", "0", str(experiment_id))  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "This policy will delete 2 checkpoints with validations and 0" in done.stdout
    assert one in done.stdout
    assert two in done.stdout
    assert three not in done.stdout
    wait_for(lambda: det.completed(experiment_id) == [three])


def test_users_log_in_change_password_log_out(det: Det) -> None:
    def whoami() -> str:
        return det.ok("user", "whoami").strip()

    assert det.type(f"{det.master.password('admin')}\n", "user", "login", "admin").returncode == 0
    det.ok("user", "create", "alice", "--password", "First-pass-1")
    assert det.type("First-pass-1\n", "user", "login", "alice").returncode == 0
    assert whoami() == "You are logged in as user 'alice'"
    assert all(name in det.ok("user", "list") for name in ("admin", "alice", "determined"))
    wrong = det.type("x\n", "user", "login", "admin")
    assert (wrong.returncode, "Invalid username/password" in wrong.stderr) == (1, True)
    assert det.type("Second-pass-1\nSecond-pass-1\n", "user", "change-password").returncode == 0
    assert whoami() == "You are logged in as user 'alice'"
    assert det.type("First-pass-1\n", "user", "login", "alice").returncode == 1
    others = det.type("Third-pass-1\nThird-pass-1\n", "user", "change-password", "admin")
    assert (others.returncode, "is no administrator" in others.stderr) == (1, True)
    det.ok("user", "logout")
    assert whoami() == "You are logged in as user 'determined'"
    assert det.type(f"{det.master.password()}\n", "user", "login", "determined").returncode == 0


def test_master_and_agent_commands_work(det: Det) -> None:
    assert "0.38.1" in det.ok("master", "info")
    assert "administrator" in det.refused("master", "config", "--json")
    shown = det.ok_as_admin("master", "config", "--json")
    config = json.loads(shown[shown.index("{") :])
    assert config["port"] == det.master.record.port
    assert config["checkpoint_storage"]["type"] == "shared_fs"
    assert "serving at" in det.ok("master", "logs")
    assert "not offered by the embedded master" in det.refused("shell", "start")
    [agent] = json.loads(det.ok("agent", "list", "--json"))
    det.ok_as_admin("slot", "disable", agent["id"], "0")
    assert "False" in det.ok("slot", "list")
    det.ok_as_admin("slot", "enable", agent["id"], "0")
    det.ok_as_admin("agent", "disable", agent["id"])
    det.ok_as_admin("agent", "enable", agent["id"])
    assert "False" not in det.ok("slot", "list").replace("| False ", "", 2)


def test_slots_and_queue_decide_run_order(det: Det) -> None:
    agent = str(det.get("agents")["agents"][0]["id"])
    det.ok_as_admin("slot", "disable", agent, "1")
    first, second, third = (det.create(det.long) for _ in range(3))
    det.wait(first, "RUNNING")
    det.settle(second, "QUEUED")
    det.ok("job", "update", str(det.experiment(third)["jobId"]), "--priority", "1")
    jobs = list(csv.DictReader(det.ok("job", "list", "--csv").splitlines()))
    names = [(row["Job Name"], row["State"], row["Slots (acquired/needed)"]) for row in jobs]
    assert names == [
        (f"long ({third})", "STATE_QUEUED", "0/1"),
        (f"long ({first})", "STATE_SCHEDULED", "1/1"),
        (f"long ({second})", "STATE_QUEUED", "0/1"),
    ]
    det.ok("e", "kill", str(first))
    det.wait(third, "RUNNING")
    det.ok_as_admin("agent", "disable", "--drain", agent)
    det.ok_as_admin("slot", "enable", agent, "1")
    det.settle(second, "QUEUED")
    assert det.experiment(third)["state"] == "STATE_RUNNING"
    det.ok_as_admin("agent", "enable", "--all")
    det.wait(second, "RUNNING")
    for experiment_id in (second, third):
        det.ok("e", "kill", str(experiment_id))
        det.wait(experiment_id, "CANCELED")


def test_sdk_reads_metrics_and_checkpoints(det: Det, ended: int) -> None:
    program = f"""
from determined.experimental import client
experiment = client.get_experiment({ended})
trial = experiment.get_trials()[0]
print([m.total_batches for m in trial.iter_metrics("validation")])
print(len(experiment.list_checkpoints(max_results=1)), trial.state.value, experiment.wait(interval=0.1).value)
experiment.add_label("sdk")
print(sorted(client.get_experiment({ended}).labels))
"""
    done = warm_start.run_command(
        [sys.executable, "-c", program], env=dict(det.master.env), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 2, 3]", "1 STATE_COMPLETED STATE_COMPLETED", "['sdk']"]


@pytest.mark.exhaustive("tests/master/test_entrypoints.py::test_script_runs_once_per_slot")
def test_determined_launcher_entrypoint_runs(det: Det) -> None:
    experiment_id = det.create(
        det.short, "--config", "entrypoint=python3 -m determined.launch.torch_distributed python3 train.py"
    )

    det.wait(experiment_id, "COMPLETED")

    of_rank = det.ok("e", "logs", str(experiment_id), "--rank-id", "0")
    assert "[rank=0] || WARNING: batch 3" in of_rank
    assert "Scheduling" not in of_rank


def test_up_logs_in_after_password_change(tmp_path: Path) -> None:
    """``dstrial up`` uses the owner's socket, so it needs no password."""
    with master_for_test(tmp_path, num_slots=1) as master:
        other_name = f"http://127.0.0.1:{master.record.port}"

        def det(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
            return typed(master, text, *words)

        assert det("user", "change-password", text="Second-pass-1\nSecond-pass-1\n").returncode == 0
        det("-m", other_name, "user", "logout")

        again = master.dstrial("up")
        assert (again.returncode, "logged in" in again.stdout) == (0, True)
        assert "as user 'determined'" in det("-m", other_name, "user", "whoami").stdout

        det("user", "logout")
        det("-m", other_name, "user", "logout")
        again = master.dstrial("up")
        # The owner of the state directory needs no password.
        assert (again.returncode, "det:      logged in" in again.stdout) == (0, True)
        assert f"as user {USERNAME!r}" in det("-m", other_name, "user", "whoami").stdout
