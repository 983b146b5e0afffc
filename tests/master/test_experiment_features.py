"""Effects of experiment config fields and master settings on real trials."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from submitting import TRAIN, checkpoints_of, config, experiment, log_of, steps_of, submit, trials, wait_until

from dstrial.errors import DstrialError
from dstrial.testing.master import MasterForTest, master_for_test

pytestmark = pytest.mark.process

SHOW = """
import os, sys
print("variables", os.environ.get("FROM_MASTER"), os.environ.get("FROM_EXPERIMENT"), os.environ.get("FROM_HOOK"))
print("executable", sys.executable)
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("settings")
    path = directory / "master.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "launch_error": False,
                "log": {"level": "debug"},
                "checkpoint_storage": {
                    "type": "shared_fs",
                    "host_path": str(directory / "saved"),
                    "save_trial_best": 2,
                },
                "resource_manager": {"default_compute_resource_pool": "machine"},
                "task_container_defaults": {
                    "environment_variables": ["FROM_MASTER=1", "FROM_EXPERIMENT=hidden"],
                    "startup_hook": "export FROM_HOOK=master\n",
                },
            }
        )
    )
    return path


@pytest.fixture(scope="module")
def master(settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterForTest]:
    options = ("--config-file", str(settings))
    with master_for_test(tmp_path_factory.mktemp("master"), num_slots=2, options=options) as running:
        yield running


def test_experiment_config_overrides_master_settings_in_trials(master: MasterForTest, settings: Path) -> None:
    given = config(environment={"environment_variables": ["FROM_EXPERIMENT=2"]}, hyperparameters={"steps": 2})

    experiment_id = submit(master, given, SHOW + TRAIN)
    wait_until(master, experiment_id, "COMPLETED")

    assert "variables 1 2 master" in log_of(master, experiment_id)
    storage = experiment(master, experiment_id)["config"]["checkpoint_storage"]
    (saved,) = checkpoints_of(master, experiment_id)
    assert storage["save_trial_best"] == 2
    assert (settings.parent / "saved" / saved["uuid"] / "state.json").is_file()
    assert master.client().get("/api/v1/resource-pools")["resourcePools"][0]["name"] == "machine"
    assert "machine" in master.det("slot", "list").stdout


@pytest.mark.parametrize("source", ["source_trial_id", "source_checkpoint_uuid"])
def test_warm_start_resumes_from_other_trials_checkpoint(master: MasterForTest, source: str) -> None:
    first = submit(master, config(hyperparameters={"steps": 4}))
    wait_until(master, first, "COMPLETED")
    (trial,) = trials(master, first)
    uuid = trial["bestCheckpoint"]["uuid"]
    value = {"source_trial_id": trial["id"], "source_checkpoint_uuid": uuid}[source]
    searcher = {"name": "single", "metric": "score", source: value}

    second = submit(master, config(hyperparameters={"steps": 6}, searcher=searcher))
    wait_until(master, second, "COMPLETED")

    (warm,) = trials(master, second)
    assert warm["warmStartCheckpointUuid"] == uuid
    assert steps_of(master, warm["id"]) == [5, 6]


@pytest.mark.parametrize(
    "source", [{"source_trial_id": 99999}, {"source_checkpoint_uuid": "11111111-2222-3333-4444-555555555555"}]
)
def test_warm_start_from_unknown_source_is_refused(master: MasterForTest, source: dict[str, Any]) -> None:
    with pytest.raises(DstrialError, match=next(iter(source))):
        submit(master, config(searcher={"name": "single", "metric": "score", **source}))


def test_configured_python_executable_runs_trial(master: MasterForTest, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python3"
    given = config(environment={"environment_variables": [f"DET_PYTHON_EXECUTABLE={python}"]})

    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "these.pth").write_text("\n".join([*packages, str(Path(__file__).parents[2])]))

    experiment_id = submit(master, given, SHOW)
    wait_until(master, experiment_id, "COMPLETED")
    assert f"executable {python}" in log_of(master, experiment_id)


def test_startup_hook_runs_first_and_failure_ends_trial(master: MasterForTest, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOW)
    (tmp_path / "exp.yaml").write_text(yaml.safe_dump(config()))
    (tmp_path / "startup-hook.sh").write_text('export FROM_HOOK="$FROM_HOOK and mine"\n')
    created = master.det("e", "create", str(tmp_path / "exp.yaml"), str(tmp_path), "-f")
    assert created.returncode == 0, created.stdout + created.stderr
    assert "variables 1 hidden master and mine" in created.stdout

    (tmp_path / "startup-hook.sh").write_text("echo hook\nfalse\n")
    failed = master.det("e", "create", str(tmp_path / "exp.yaml"), str(tmp_path), "-f")
    assert "hook" in failed.stdout
    assert "variables" not in failed.stdout
    assert master.det("e", "wait", failed.stdout.split("Created experiment ")[1].split()[0]).returncode == 1


def test_invalid_hyperparameters_end_single_trial_experiment(master: MasterForTest) -> None:
    experiment_id = submit(master, config(hyperparameters={"invalid": True}))

    wait_until(master, experiment_id, "ERROR", "COMPLETED")

    found = trials(master, experiment_id)
    assert len(found) == 1
    assert "its hyperparameters are invalid" in log_of(master, experiment_id)
