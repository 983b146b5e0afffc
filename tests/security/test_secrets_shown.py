"""Secrets in configs reach the trial, but no response, command output or page."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from det_here import DetHere

from dstrial.master.login import new_token
from dstrial.master.server import all_routes
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

MASK = "********"
SECRETS = {
    "variable": "hunter-variable",
    "hyperparameter": "hunter-hyperparameter",
    "registry": "hunter-registry",
    "template": "hunter-template",
    "master": "hunter-master",
    "hook": "hunter-hook",
    "listed": "hunter-listed",
    "command": "hunter-command",
    "task": "hunter-task",
    "tensorboard": "hunter-tensorboard",
    "metadata": "hunter-metadata",
}
SETTINGS = f"""
masked_names: ["*_LICENSE"]
task_container_defaults:
  environment_variables: ["MASTER_SECRET={SECRETS["master"]}"]
  startup_hook: "export HOOK_TOKEN={SECRETS["hook"]}\\n"
"""
TRAIN = """
import json, os, pathlib, sys
import determined as det

info = det.get_cluster_info()
seen = {name: os.environ.get(name) for name in ("HF_TOKEN", "MASTER_SECRET", "HOOK_TOKEN", "MY_LICENSE", "OF_TEMPLATE_KEY")}
seen["api_key"] = info.trial.hparams["api_key"]
seen["in config"] = info.trial._config["hyperparameters"]["api_key"]["val"]
seen["in variable"] = json.loads(os.environ["DET_HPARAMS"])["api_key"]
with det.core.init(tensorboard_mode=det.core.TensorboardMode.MANUAL) as core:
    core.train.report_validation_metrics(1, {"score": 1.0})
    metadata = {"steps_completed": 1, "hparams": {"api_key": METADATA}}
    with core.checkpoint.store_path(metadata) as (path, _):
        (path / "state").write_text("x")
pathlib.Path(sys.argv[1]).write_text(json.dumps(seen))
"""
TEMPLATE = {"environment": {"environment_variables": [f"OF_TEMPLATE_KEY={SECRETS['template']}"]}}
CONFIG = """\
# the whole of it
name: secrets
entrypoint: python3 train.py {seen}
hyperparameters:
  api_key: {hyperparameter}   # mine
  num_key_value_heads: 8
searcher: {{name: single, metric: score}}
max_restarts: 0
environment:
  environment_variables: ["HF_TOKEN={variable}", "MY_LICENSE={listed}", "TOKENIZERS_PARALLELISM=false"]
  registry_auth: {{username: me, password: {registry}}}
"""


class SecretsCluster:
    """A master with a finished trial, a template and tasks, each with a secret."""

    def __init__(self, master: MasterForTest, directory: Path) -> None:
        self.master = master
        self.directory = directory
        self.token = new_token(master.record)
        self.text = CONFIG.format(seen=directory / "seen.json", **SECRETS)
        context = directory / "context"
        context.mkdir()
        (context / "train.py").write_text(TRAIN.replace("METADATA", repr(SECRETS["metadata"])))
        (directory / "config.yaml").write_text(self.text)
        (directory / "template.yaml").write_text(yaml.safe_dump(TEMPLATE))
        self.ok("template", "create", "held", str(directory / "template.yaml"))
        self.create("config.yaml", "--template", "held", "-f")
        self.ok(
            "command", "run", "--config", f'environment.environment_variables=["A_TOKEN={SECRETS["command"]}"]', "true"
        )  # fmt: skip
        task = {
            "entrypoint": ["true"],
            "environment": {"environment_variables": [f"PASSWORD={SECRETS['task']}"]},
        }
        (directory / "task.yaml").write_text(yaml.safe_dump(task))
        self.ok("task", "create", str(directory / "task.yaml"))
        variables = json.dumps([f"GH_PAT={SECRETS['tensorboard']}"])
        self.ok(
            "tensorboard", "start", "1", "--detach", "--no-browser",
            "--config", f"environment.environment_variables={variables}",
        )  # fmt: skip

    def det(self, *words: str) -> tuple[int, str]:
        done = self.master.det(*words, cwd=self.directory)
        return done.returncode, done.stdout + done.stderr

    def ok(self, *words: str) -> str:
        code, text = self.det(*words)
        assert code == 0, text
        return text

    def create(self, config: str, *options: str) -> str:
        return self.ok("experiment", "create", str(self.directory / config), "context", *options)

    def get(self, path: str) -> bytes:
        request = urllib.request.Request(
            f"{self.master.address}{path}",
            headers={"Authorization": f"Bearer {self.token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            return bytes(error.read())

    def json(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get(f"/api/v1/{path}"))
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecretsCluster]:
    directory = tmp_path_factory.mktemp("held")
    (directory / "master.yaml").write_text(SETTINGS)
    with master_for_test(directory, options=["--config-file", str(directory / "master.yaml")]) as master:
        yield SecretsCluster(master, directory)


def shown_secrets(text: str) -> list[str]:
    return sorted(name for name, value in SECRETS.items() if value in text)


def test_trial_receives_every_secret(cluster: SecretsCluster) -> None:
    assert json.loads((cluster.directory / "seen.json").read_text()) == {
        "HF_TOKEN": SECRETS["variable"],
        "MASTER_SECRET": SECRETS["master"],
        "HOOK_TOKEN": SECRETS["hook"],
        "MY_LICENSE": SECRETS["listed"],
        "OF_TEMPLATE_KEY": SECRETS["template"],
        "api_key": SECRETS["hyperparameter"],
        "in config": SECRETS["hyperparameter"],
        "in variable": SECRETS["hyperparameter"],
    }


def test_get_responses_contain_no_secret(cluster: SecretsCluster) -> None:
    checkpoint = cluster.json("experiments/1/checkpoints")["checkpoints"][0]["uuid"]
    tasks = list(cluster.json("tasks")["allocationIdToSummary"])
    values = {
        "task_id": [task.rpartition(".")[0] for task in tasks],
        "allocation_id": tasks,
        "checkpoint_uuid": [checkpoint],
        "template": ["held"],
    }
    values["task_id"] += [
        one["id"] for kind in ("commands", "tensorboards") for one in cluster.json(kind)[kind]
    ]
    asked, answered = 0, 0
    for route in all_routes():
        # The event stream never ends, and contains only topic names.
        if route.method != "GET" or route.path == "/page/events":
            continue
        (name, *_) = [*re.findall(r"{(\w+)", route.path), ""]
        for value in values.get(name, ["1"]):
            path = re.sub(r"{[^}]*}", urllib.parse.quote(str(value)), route.path)
            text = cluster.get(path).decode(errors="replace")
            asked += 1
            answered += '"error"' not in text[:12]
            # User files (model definition, checkpoint) are sent compressed, so their secrets do not match.
            assert shown_secrets(text) == [], path
    assert asked > 60
    assert answered > 40


def test_commands_and_pages_print_no_secret(cluster: SecretsCluster, tmp_path: Path) -> None:
    det = DetHere.at(cluster.master, tmp_path)
    checkpoint = cluster.json("experiments/1/checkpoints")["checkpoints"][0]["uuid"]
    assert cluster.master.dstrial("login", "--user", "admin").returncode == 0
    assert cluster.master.dstrial("login").returncode == 0
    texts = [
        det.ok(*words.split())
        for words in (
            "experiment config 1",
            "experiment describe --json 1",
            "experiment list",
            "trial describe --json 1",
            f"checkpoint describe {checkpoint}",
            "template describe held",
            "template list -d",
            "master logs",
            "trial logs 1",
            "job list",
        )
    ]
    texts.append(cluster.ok("-u", "admin", "master", "config", "show"))
    texts += [cluster.get(page).decode() for page in ("/", "/?experiment=1&trial=1", "/det/experiments/1")]
    texts.append(cluster.master.dstrial("status").stdout)
    texts.append(cluster.master.dstrial("logs").stdout)

    assert [shown_secrets(text) for text in texts] == [[]] * len(texts)
    assert all(texts)
    assert texts[0].count(MASK) >= 4
    assert "TOKENIZERS_PARALLELISM=false" in texts[0]
    assert yaml.safe_load(texts[0])["hyperparameters"]["num_key_value_heads"] == {"type": "const", "val": 8}


def test_original_config_masks_only_secrets(cluster: SecretsCluster) -> None:
    original = cluster.json("experiments/1")["experiment"]["originalConfig"]

    text = cluster.text
    for name in ("hyperparameter", "variable", "listed", "registry"):
        text = text.replace(f"={SECRETS[name]}", f"={MASK}").replace(SECRETS[name], f'"{MASK}"')
    assert yaml.safe_load(original) == yaml.safe_load(text)


def test_masked_config_without_parent_is_rejected(cluster: SecretsCluster) -> None:
    shown = cluster.ok("experiment", "config", "1")
    (cluster.directory / "again.yaml").write_text(shown)

    code, text = cluster.det("experiment", "create", "again.yaml", "context")

    assert code != 0
    text = " ".join(text.split())
    assert f"hyperparameters.api_key.val is {MASK}" in text
    assert "environment.environment_variables.cpu.HF_TOKEN" in text
    assert "Write the real value" in text


def test_fork_and_continue_keep_real_secrets(cluster: SecretsCluster) -> None:
    original = cluster.json("experiments/1")["experiment"]["originalConfig"]
    files = cluster.json("experiments/1/model_def")["b64Tgz"]
    assert files
    (cluster.directory / "seen.json").unlink()

    made = cluster.master.client().post(
        "/api/v1/experiments",
        {"config": original, "parentId": 1, "template": "held", "activate": True, "modelDefinition": []},
    )
    cluster.ok("experiment", "wait", str(made["experiment"]["id"]))

    assert shown_secrets(json.dumps(made)) == []
    test_trial_receives_every_secret(cluster)
    (cluster.directory / "seen.json").unlink()
    (cluster.directory / "changed.yaml").write_text(
        yaml.safe_dump({"hyperparameters": {"api_key": MASK, "lr": 0.1}, "searcher": {"name": "single"}})
    )
    cluster.ok("experiment", "continue", "1", "--config-file", "changed.yaml", "-f")
    test_trial_receives_every_secret(cluster)


def test_masked_template_and_metadata_updates_keep_secrets(
    cluster: SecretsCluster,
) -> None:
    shown = yaml.safe_load(cluster.ok("template", "describe", "held"))
    assert shown["environment"]["environment_variables"] == [f"OF_TEMPLATE_KEY={MASK}"]
    shown["description"] = "changed"
    cluster.master.client().send("PATCH", "/api/v1/templates/held", body=shown)
    uuid = cluster.json("experiments/1/checkpoints")["checkpoints"][0]["uuid"]
    metadata = cluster.json(f"checkpoints/{uuid}")["checkpoint"]["metadata"]
    assert metadata["hparams"] == {"api_key": MASK}
    body = {"checkpoint": {"metadata": {**metadata, "mine": 1}}}
    cluster.master.client().post(f"/api/v1/checkpoints/{uuid}/metadata", body)

    assert shown_secrets(json.dumps(cluster.json("templates/held"))) == []
    with sqlite(cluster) as connection:
        kept = connection.execute("SELECT config FROM templates").fetchone()[0]
        assert SECRETS["template"] in kept
        assert "changed" in kept
        kept = connection.execute("SELECT metadata FROM checkpoints WHERE uuid = ?", (uuid,)).fetchone()[0]
        assert json.loads(kept) == {
            "steps_completed": 1, "hparams": {"api_key": SECRETS["metadata"]}, "mine": 1
        }  # fmt: skip


def sqlite(cluster: SecretsCluster) -> Any:
    import contextlib
    import sqlite3

    return contextlib.closing(sqlite3.connect(cluster.master.state.database_path))
