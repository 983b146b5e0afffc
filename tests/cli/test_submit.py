"""Configs and records that ``dstrial run`` submits, and its own master."""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_for

from dstrial.cli.experiment_arguments import ResumePoint, parse_entrypoint
from dstrial.cli.run import add_parser
from dstrial.cli.submit import (
    RunRequest,
    Submission,
    command_line,
    config_of_run,
    fingerprint,
    submitted_config,
)
from dstrial.config.experiment_config.config import load_experiment
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


def request_of(
    directory: Path,
    entrypoint: str = "ls",
    more: str = "",
    checkpoint: Path | None = None,
    num_slots: int = 3,
    **flags: object,
) -> RunRequest:
    (directory / "exp.yaml").write_text(CONFIG.format(entrypoint="ls", more=more))
    flags = {"test": False, "python": "/hosts/python"} | flags
    return RunRequest(
        argparse.Namespace(**flags),
        load_experiment(directory / "exp.yaml", directory),
        parse_entrypoint(entrypoint, "x"),
        list_context(directory),
        num_slots=num_slots,
        max_restarts=1,
        point=None if checkpoint is None else ResumePoint(None, checkpoint),
    )


@pytest.mark.parametrize(
    ("entrypoint", "submitted"),
    [
        ("train:Trial", ["python3", "-m", "dstrial.launch", "--trial", "train:Trial"]),
        ("python3 train.py --lr 1", ["python3", "-m", "dstrial.launch", "python3", "train.py", "--lr", "1"]),
        ("torchrun --nproc-per-node 2 train.py", ["torchrun", "--nproc-per-node", "2", "train.py"]),
    ],
)
def test_submitted_config_wraps_commands_with_dstrial_launcher(
    tmp_path: Path, entrypoint: str, submitted: list[str]
) -> None:
    (tmp_path / "train.py").write_text("class Trial: pass\n")
    request = request_of(tmp_path, entrypoint, num_slots=2)
    before = copy.deepcopy(request.experiment.raw)
    config = submitted_config(request)
    assert config["entrypoint"] == submitted
    assert config["resources"]["slots_per_trial"] == 2
    assert config["max_restarts"] == 1
    assert request.experiment.raw == before


def test_config_of_run_sets_storage_and_environment(tmp_path: Path, run_directory: RunDirectory) -> None:
    request = request_of(tmp_path, checkpoint=tmp_path / "checkpoint", test=True)
    whole = config_of_run(submitted_config(request), request, run_directory)
    assert set(whole["environment"]["environment_variables"]) == {
        "FROM_CONFIG=a b",
        "DET_PYTHON_EXECUTABLE=/hosts/python",
        f"DSTRIAL_RUN_DIR={run_directory.path}",
        f"DSTRIAL_RESUME={tmp_path / 'checkpoint'}",
        "DSTRIAL_TEST=1",
    }
    assert whole["checkpoint_storage"]["type"] == "shared_fs"
    assert whole["checkpoint_storage"]["host_path"] == str(run_directory.checkpoints_path)
    for more, kept in (("", {}), ("checkpoint_storage: {save_trial_best: 2}", {"save_trial_best": 2})):
        request = request_of(tmp_path, more=more)
        storage = config_of_run(submitted_config(request), request, run_directory)["checkpoint_storage"]
        assert {key: value for key, value in storage.items() if key.startswith("save_")} == kept


def test_fingerprint_depends_on_config_and_packed_files(tmp_path: Path) -> None:
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


def test_submission_is_read_back_unless_damaged(run_directory: RunDirectory) -> None:
    assert Submission.read(run_directory) is None
    submission = Submission(7, "cluster", "print", {"save_trial_best": 1})
    submission.write(run_directory)
    assert Submission.read(run_directory) == submission
    run_directory.submission_path.write_text("{}")
    assert Submission.read(run_directory) is None


def test_command_line_repeats_flags_with_changes() -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    words = [
        "run",
        "exp.yaml",
        "context",
        "--config",
        "a=1",
        "--config",
        "b=2",
        "--slots",
        "2",
    ]
    slurm = ["--slurm", "--sbatch-arg=--time=1", "--sbatch-arg=--qos=x"]
    args = parser.parse_args([*words, *slurm, "--detach", "--run-dir", "runs/x/1"])
    assert command_line(args) == [*words, *slurm]
    changed = [*words[:-1], "4", "--resume", "latest", *slurm]
    assert command_line(args, slots=4, resume="latest") == changed


_OWNER = """
import sys
from pathlib import Path
from dstrial.cli.submit import own_master
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
