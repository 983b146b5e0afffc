from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.cli.run_entrypoint import parse_entrypoint
from dstrial.cli.run_submission import (
    Submission,
    config_of_run,
    fingerprint,
    submitted_config,
)
from dstrial.config import ExperimentConfig, load_experiment
from dstrial.context_directory import list_context
from dstrial.local.run_directory import RunDirectory
from dstrial.master.state_directory import process_start_time

CONFIG = """
name: x
entrypoint: {entrypoint}
searcher: {{name: single, metric: loss, max_length: {{batches: 10}}}}
environment: {{environment_variables: ["FROM_CONFIG=a b"]}}
resources: {{slots_per_trial: 3}}
{more}
"""


def experiment_of(directory: Path, entrypoint: str = "ls", more: str = "") -> ExperimentConfig:
    (directory / "exp.yaml").write_text(CONFIG.format(entrypoint=entrypoint, more=more))
    return load_experiment(directory / "exp.yaml", directory)


@pytest.fixture
def run_directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(
        tmp_path / "runs", name="x", context_dir=tmp_path, command=["dstrial"], config={}
    )


@pytest.mark.parametrize(
    ("entrypoint", "submitted"),
    [
        ("train:Trial", ["python3", "-m", "dstrial.launch", "--trial", "train:Trial"]),
        ("python3 train.py --lr 1", ["python3", "-m", "dstrial.launch", "python3", "train.py", "--lr", "1"]),
        ("torchrun --nproc-per-node 2 train.py", ["torchrun", "--nproc-per-node", "2", "train.py"]),
    ],
)
def test_ranks_are_started_by_our_launcher_unless_the_command_starts_them(
    tmp_path: Path, entrypoint: str, submitted: list[str]
) -> None:
    (tmp_path / "train.py").write_text("class Trial: pass\n")
    experiment = experiment_of(tmp_path)
    before = copy.deepcopy(experiment.raw)
    config = submitted_config(experiment, parse_entrypoint(entrypoint, "x"), num_slots=2, max_restarts=1)
    assert config["entrypoint"] == submitted
    assert config["resources"]["slots_per_trial"] == 2
    assert config["max_restarts"] == 1
    assert experiment.raw == before


def test_the_trial_is_told_its_run_directory_and_keeps_its_checkpoints_there(
    tmp_path: Path, run_directory: RunDirectory
) -> None:
    experiment = experiment_of(tmp_path)
    config = submitted_config(experiment, parse_entrypoint("ls", "x"), num_slots=3, max_restarts=0)
    whole = config_of_run(
        config,
        experiment,
        run_directory,
        checkpoint=tmp_path / "checkpoint",
        is_test=True,
        is_search=False,
        python="/hosts/python",
    )
    assert set(whole["environment"]["environment_variables"]) == {
        "FROM_CONFIG=a b",
        "DET_PYTHON_EXECUTABLE=/hosts/python",
        f"DSTRIAL_RUN_DIR={run_directory.path}",
        f"DSTRIAL_RESUME={tmp_path / 'checkpoint'}",
        "DSTRIAL_TEST=1",
    }
    assert whole["checkpoint_storage"]["type"] == "shared_fs"
    assert whole["checkpoint_storage"]["host_path"] == str(run_directory.checkpoints_path)


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ("", {}),
        ("checkpoint_storage: {save_trial_best: 2}", {"save_trial_best": 2}),
    ],
)
def test_the_master_is_told_which_checkpoints_to_keep_only_where_the_config_says_so(
    tmp_path: Path, run_directory: RunDirectory, more: str, kept: dict[str, int]
) -> None:
    experiment = experiment_of(tmp_path, more=more)
    config = submitted_config(experiment, parse_entrypoint("ls", "x"), num_slots=1, max_restarts=0)
    whole = config_of_run(
        config, experiment, run_directory, checkpoint=None, is_test=False, is_search=False, python="python"
    )
    storage = whole["checkpoint_storage"]
    assert {key: value for key, value in storage.items() if key.startswith("save_")} == kept


def test_another_config_or_another_file_is_another_submission(tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "train.py").write_text("a")
    (context / "data.bin").write_text("large")
    (context / ".detignore").write_text("*.bin\n")
    first = fingerprint({"a": 1}, list_context(context).v1_files())
    (context / "data.bin").write_text("larger")
    assert fingerprint({"a": 1}, list_context(context).v1_files()) == first
    assert fingerprint({"a": 2}, list_context(context).v1_files()) != first
    (context / "train.py").write_text("b")
    assert fingerprint({"a": 1}, list_context(context).v1_files()) != first


def test_what_was_submitted_is_remembered(run_directory: RunDirectory) -> None:
    assert Submission.read(run_directory) is None
    submission = Submission(7, "cluster", "print", {"save_trial_best": 1})
    submission.write(run_directory)
    assert Submission.read(run_directory) == submission
    run_directory.submission_path.write_text("{}")
    assert Submission.read(run_directory) is None


_OWNER = """
import sys
from pathlib import Path
from dstrial.cli.run_submission import own_master
from dstrial.local.run_directory import RunDirectory
from dstrial.master.daemon import MasterOptions
with own_master(RunDirectory(Path(sys.argv[1])), MasterOptions(num_slots=1)) as master:
    print(master.record.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.parametrize("is_killed", [True, False])
def test_own_master_ends_with_its_command(tmp_path: Path, is_killed: bool) -> None:
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert process_start_time(pid) is not None
        if is_killed:
            owner.kill()
        owner.communicate()
    wait_for(lambda: process_start_time(pid) is None)
