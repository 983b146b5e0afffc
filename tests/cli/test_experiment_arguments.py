"""Entrypoint parsing, and the run and checkpoint that ``--resume`` selects."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dstrial.cli.checkpoint import find_checkpoint
from dstrial.cli.experiment_arguments import Entrypoint, ResumePoint, parse_entrypoint, resume_point
from dstrial.errors import CheckpointNotFoundError, ConfigError
from dstrial.local.run_directory import RunDirectory


@pytest.mark.parametrize(
    "entrypoint",
    [
        "model_def:MyTrial",
        ["model_def:MyTrial"],
        "python3 -m dstrial.launch --trial model_def:MyTrial",
        "python3 -m dstrial.launch --slots 4 --config=x.yaml --trial=model_def:MyTrial",
        "python -u -m dstrial.launch --trial model_def:MyTrial",
        "python3 -m determined.launch.deepspeed --trial model_def:MyTrial",
        ["python3", "-m", "dstrial.launch", "--trial", "model_def:MyTrial"],
    ],
)
def test_parse_entrypoint_finds_trial_class(entrypoint: str | Sequence[str]) -> None:
    assert parse_entrypoint(entrypoint, "exp.yaml") == Entrypoint("model_def:MyTrial")


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("python3 train.py --lr 0.1", ("python3", "train.py", "--lr", "0.1")),
        ("python3 train.py --trial a:B", ("python3", "train.py", "--trial", "a:B")),
        ("python3 -m dstrial.launch --slots 2 train.py --lr 0.1", ("train.py", "--lr", "0.1")),
        ("python3 -m dstrial.launch -- train.py", ("train.py",)),
        ("python3 -m determined.launch.torch_distributed python3 train.py", ("python3", "train.py")),
        (
            "python3 -m determined.launch.torch_distributed --max_restarts 3 -- python3 'my train.py'",
            ("python3", "my train.py"),
        ),
        ("A=1 python3 train.py && echo $A", ("sh", "-c", "A=1 python3 train.py && echo $A")),
        (["python3", "train.py", "a && b"], ("python3", "train.py", "a && b")),
    ],
)
def test_parse_entrypoint_keeps_command_of_each_rank(
    entrypoint: str | Sequence[str], words: tuple[str, ...]
) -> None:
    assert parse_entrypoint(entrypoint, "exp.yaml") == Entrypoint(None, words)


@pytest.mark.parametrize(
    "entrypoint", ["torchrun --nproc-per-node 2 train.py", "/usr/bin/deepspeed train.py"]
)
def test_entrypoint_with_foreign_launcher_starts_ranks_itself(entrypoint: str) -> None:
    assert parse_entrypoint(entrypoint, "exp.yaml").starts_ranks


@pytest.mark.parametrize(
    "entrypoint",
    [
        None,
        "",
        [],
        "python3 'train.py",
        "python3 -m dstrial.launch",
        "python3 -m dstrial.launch --slots 2",
        "python3 -m dstrial.launch --trial MyTrial",
        "cd x && python3 -m dstrial.launch --trial model_def:MyTrial",
    ],
)
def test_invalid_entrypoint_is_rejected(
    entrypoint: str | Sequence[str] | None,
) -> None:
    with pytest.raises(
        ConfigError, match=r"exp\.yaml: entrypoint is .*; expected module:Class, or a command\. "
    ):
        parse_entrypoint(entrypoint, "exp.yaml")


def create(runs_dir: Path, num_checkpoints: int, path: Path | None = None) -> RunDirectory:
    run_directory = RunDirectory.create(
        runs_dir, name="t", context_dir=Path("ctx"), command=["t"], config={}, path=path
    )
    for checkpoint_idx in range(num_checkpoints):
        checkpoint = run_directory.checkpoints_path / f"u{checkpoint_idx}"
        checkpoint.mkdir()
        (checkpoint / "COMPLETE").write_text(
            f'{{"steps_completed": 1{checkpoint_idx}, "time": "{checkpoint_idx}"}}'
        )
    return run_directory


def resolve(resume: str, runs_dir: Path) -> ResumePoint:
    return resume_point(resume, runs_dir=runs_dir, name="t", context_dir=Path("ctx"))


def test_resume_latest_skips_runs_without_checkpoint(tmp_path: Path) -> None:
    create(tmp_path, 0)
    with pytest.raises(
        CheckpointNotFoundError, match=r"no run of 't' .* has a complete checkpoint; expected"
    ):
        resolve("latest", tmp_path)
    create(tmp_path, 1)
    older = create(tmp_path, 2)
    point = resolve("latest", tmp_path)
    assert point == ResumePoint(older, older.checkpoints_path / "u1")
    assert point.steps_completed == 11
    newest = create(tmp_path, 0)
    point = resolve("latest", tmp_path)
    assert point.run_directory == older
    assert point.note == f"the newest run {newest.path} has no complete checkpoint; resuming {older.path}"


def test_resume_accepts_run_or_checkpoint_directory(tmp_path: Path) -> None:
    run_directory = create(tmp_path, 2)
    create(tmp_path, 1)
    assert resolve(str(run_directory.path), tmp_path).checkpoint == run_directory.checkpoints_path / "u1"
    first = run_directory.checkpoints_path / "u0"
    assert resolve(str(first), tmp_path) == ResumePoint(run_directory, first)
    empty = create(tmp_path, 0)
    with pytest.raises(CheckpointNotFoundError, match="has no complete checkpoint; expected one"):
        resolve(str(empty.path), tmp_path)


def test_best_checkpoint_is_taken_from_newest_run(tmp_path: Path) -> None:
    def found() -> Path:
        return find_checkpoint("best", runs_dir=str(tmp_path), state_dir=str(tmp_path / "state")).path

    with pytest.raises(CheckpointNotFoundError, match="there is no run in"):
        found()
    older = create(tmp_path, 2)
    older.link_best("u0")
    assert found() == older.checkpoints_path / "u0"
    newer = create(tmp_path, 1, tmp_path / "u" / "20990101T000000Z-0a1b2c")
    with pytest.raises(CheckpointNotFoundError, match=f"the newest run, {newer.path}, has none"):
        found()
    uuid = "5bd8a1e9-0f0c-4c8e-8a3e-7d6f6a8d1a11"  # deleted, or stored elsewhere
    newer.link_best(uuid)
    with pytest.raises(CheckpointNotFoundError, match=f"checkpoint {uuid} is in no run of"):
        found()


def test_resume_from_foreign_checkpoint_starts_new_run(tmp_path: Path) -> None:
    checkpoint = create(tmp_path, 1).checkpoints_path / "u0"
    moved = checkpoint.rename(tmp_path / "moved")
    point = resolve(str(moved), tmp_path)
    assert point == ResumePoint(None, moved)
    assert point.steps_completed is None
