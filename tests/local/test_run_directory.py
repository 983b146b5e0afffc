"""Creation, records and locks of run directories."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dstrial.errors import LaunchError
from dstrial.local.run_directory import (
    RunDirectory,
    RunState,
    experiment_slug,
    find_runs,
)


def create(runs_dir: Path, name: str = "digits", context_dir: Path = Path("ctx")) -> RunDirectory:
    return RunDirectory.create(
        runs_dir,
        name=name,
        context_dir=context_dir,
        command=["dstrial", "run"],
        config={"name": name, "b": [1]},
    )


def test_create_writes_running_record_and_config(tmp_path: Path) -> None:
    run_directory = create(tmp_path / "my runs", "my: experiment/1")
    assert run_directory.path.parent == tmp_path / "my runs" / "my-experiment-1"
    record = run_directory.read_record()
    assert (record.name, record.state, record.num_attempts) == ("my: experiment/1", RunState.RUNNING, 1)
    assert record.context_dir == str(Path("ctx").resolve())
    assert yaml.safe_load(run_directory.experiment_config_path.read_text()) == {
        "name": "my: experiment/1",
        "b": [1],
    }
    assert run_directory.checkpoints_path.is_dir()
    assert run_directory.tensorboard_path.is_dir()
    assert run_directory.attempt_logs_path(1) == run_directory.path / "logs" / "attempt_1"


def test_attempts_are_counted_and_ends_recorded(tmp_path: Path) -> None:
    run_directory = create(tmp_path)
    run_directory.end_attempt(RunState.FAILED, "rank 1: boom")
    record = run_directory.read_record()
    assert (record.state, record.failure) == (RunState.FAILED, "rank 1: boom")
    assert record.ended is not None
    run_directory.begin_attempt(["dstrial", "run", "--resume"])
    record = run_directory.read_record()
    assert (record.state, record.failure, record.ended, record.num_attempts) == (
        RunState.RUNNING,
        None,
        None,
        2,
    )
    assert record.command[-1] == "--resume"


def test_find_runs_filters_and_sorts_newest_first(tmp_path: Path) -> None:
    assert find_runs(tmp_path, "digits", tmp_path / "a") == []
    mine = [create(tmp_path, "digits", tmp_path / "a") for _ in range(3)]
    create(tmp_path, "digits", tmp_path / "b")
    create(tmp_path, "other", tmp_path / "a")
    assert find_runs(tmp_path, "digits", tmp_path / "b" / ".." / "a") == mine[::-1]


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"name": "x"}', b"\x00\xff"])
def test_find_runs_skips_damaged_record_with_warning(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sound, damaged = create(tmp_path), create(tmp_path)
    damaged.record_path.write_bytes(content)
    assert find_runs(tmp_path, "digits", Path("ctx")) == [sound]
    assert f"the run {damaged.path} is left out" in caplog.text


def test_create_in_invalid_runs_directory_is_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        LaunchError, match=r"cannot be made \(Not a directory\); expected .* --runs-dir or DSTRIAL_RUNS_DIR"
    ):
        create(tmp_path / "file" / "runs")


@pytest.mark.parametrize(
    ("name", "slug"), [("../../etc", "etc"), ("..", "experiment"), ("", "experiment"), ("a.b-c_1", "a.b-c_1")]
)
def test_experiment_slug_contains_no_path_traversal(name: str, slug: str) -> None:
    assert experiment_slug(name) == slug


@pytest.mark.process
def test_lock_is_exclusive_until_owner_dies(tmp_path: Path) -> None:
    run_directory = create(tmp_path)
    program = (
        "import sys, time\nfrom dstrial.local.run_directory import RunDirectory\n"
        "with RunDirectory.open(sys.argv[1]).lock():\n    print('locked', flush=True)\n    time.sleep(600)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(run_directory.path)],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(LaunchError, match=f"in use by process {owner.pid}"), run_directory.lock():
            pass
    finally:
        owner.kill()
        owner.wait()
        if owner.stdout is not None:
            owner.stdout.close()
    with run_directory.lock():
        pass


def test_begin_logs_shares_attempt_per_allocation(tmp_path: Path) -> None:
    run_directory = RunDirectory.create(tmp_path, name="x", context_dir=tmp_path, command=["x"], config={})
    first = run_directory.attempt_logs_path(1)
    assert [run_directory.begin_logs("1.1") for _ in range(2)] == [first, first]
    second = run_directory.attempt_logs_path(2)
    assert [run_directory.begin_logs("1.2") for _ in range(2)] == [second, second], "a restart"
    run_directory.begin_attempt(["x"])
    assert run_directory.begin_logs("1.3") == run_directory.attempt_logs_path(3)
