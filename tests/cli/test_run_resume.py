"""Which run ``--resume`` goes on with; the runs and checkpoints are real directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.cli.run_resume import ResumePoint, resume_point
from dstrial.errors import CheckpointNotFoundError
from dstrial.local.run_directory import RunDirectory


def create(runs_dir: Path, num_checkpoints: int) -> RunDirectory:
    run_directory = RunDirectory.create(runs_dir, name="t", context_dir=Path("ctx"), command=["t"], config={})
    for checkpoint_idx in range(num_checkpoints):
        checkpoint = run_directory.checkpoints_path / f"u{checkpoint_idx}"
        checkpoint.mkdir()
        (checkpoint / "COMPLETE").write_text(
            f'{{"steps_completed": 1{checkpoint_idx}, "time": "{checkpoint_idx}"}}'
        )
    return run_directory


def resolve(resume: str, runs_dir: Path) -> ResumePoint:
    return resume_point(resume, runs_dir=runs_dir, name="t", context_dir=Path("ctx"))


def test_latest_is_the_newest_run_and_its_newest_checkpoint(tmp_path: Path) -> None:
    create(tmp_path, 1)
    newest = create(tmp_path, 2)
    point = resolve("latest", tmp_path)
    assert point == ResumePoint(newest, newest.checkpoints_path / "u1")
    assert point.steps_completed == 11


def test_latest_goes_past_a_run_without_a_checkpoint_and_says_so(tmp_path: Path) -> None:
    create(tmp_path, 1)
    older, newest = create(tmp_path, 1), create(tmp_path, 0)
    point = resolve("latest", tmp_path)
    assert point.run_directory == older
    assert (
        point.note == f"the newest run {newest.path} has no complete checkpoint; going on with {older.path}"
    )


def test_latest_of_runs_without_any_checkpoint_is_an_error(tmp_path: Path) -> None:
    create(tmp_path, 0)
    create(tmp_path, 0)
    with pytest.raises(CheckpointNotFoundError, match=r"no run of 't' .* has a complete checkpoint in"):
        resolve("latest", tmp_path)


def test_a_run_or_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    run_directory = create(tmp_path, 2)
    create(tmp_path, 1)
    assert resolve(str(run_directory.path), tmp_path).checkpoint == run_directory.checkpoints_path / "u1"
    first = run_directory.checkpoints_path / "u0"
    assert resolve(str(first), tmp_path) == ResumePoint(run_directory, first)
    empty = create(tmp_path, 0)
    with pytest.raises(
        CheckpointNotFoundError, match="has no complete checkpoint; expected one to resume from"
    ):
        resolve(str(empty.path), tmp_path)


def test_a_checkpoint_of_no_run_starts_a_new_one(tmp_path: Path) -> None:
    checkpoint = create(tmp_path, 1).checkpoints_path / "u0"
    moved = checkpoint.rename(tmp_path / "moved")
    point = resolve(str(moved), tmp_path)
    assert point == ResumePoint(None, moved)
    assert point.steps_completed is None
