"""Retention policy of checkpoints, and deletion of a checkpoint's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master.lifecycle import checkpoint_gc
from dstrial.master.lifecycle.checkpoint_gc import Candidate, Policy, checkpoint_directory, delete_files, plan

UUID = "b3b4a7b8-0000-4000-8000-000000000001"


def in_directory(path: Path) -> dict[str, dict[str, str]]:
    return {"checkpoint_storage": {"type": "directory", "container_path": str(path)}}


CANDIDATES = [
    Candidate("a1", 1, 10, 0.9),
    Candidate("a2", 1, 20, 0.5),
    Candidate("a3", 1, 30, None),
    Candidate("b1", 2, 10, 0.1),
    Candidate("b2", 2, 20, 0.3),
    Candidate("b3", 2, 30, 0.2),
]


@pytest.mark.parametrize(
    ("policy", "smaller_is_better", "deleted"),
    [
        (Policy(0, 0, 0), True, "a1 a2 a3 b1 b2 b3"),
        (Policy(0, 1, 1), True, "a1 b2"),
        (Policy(0, 1, 1), False, "a2 b1"),
        (Policy(2, 0, 0), True, "a1 a2 a3 b2"),
        (Policy(9, 0, 0), True, "a3"),
        (Policy(0, 0, 2), True, "a1 b1"),
    ],
)
def test_plan_keeps_best_and_newest(policy: Policy, smaller_is_better: bool, deleted: str) -> None:
    assert plan(CANDIDATES, policy, smaller_is_better=smaller_is_better) == deleted.split()


def test_plan_prefers_earlier_of_equal_checkpoints() -> None:
    equal = [
        Candidate("later", 1, 20, 0.5),
        Candidate("earlier", 1, 10, 0.5),
        Candidate("newest", 1, 30, 0.7),
    ]
    assert plan(equal, Policy(0, 1, 1), smaller_is_better=True) == ["later"]
    assert plan(equal, Policy(1, 0, 1), smaller_is_better=True) == ["later"]


def test_delete_files_escapes_undecodable_names(tmp_path: Path) -> None:
    checkpoint = tmp_path / UUID
    checkpoint.mkdir()
    for name in (b"drop.me", b"caf\xe9.bin"):
        Path(os.fsdecode(os.fsencode(checkpoint) + b"/" + name)).touch()
    config = in_directory(tmp_path)

    assert delete_files(config, UUID, ["drop.me"]) == {"caf\\xe9.bin": 0}


def test_delete_files_listing_error_raises_master_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The janitor releases its claim on a checkpoint only for a ``DstrialError``."""

    def fail(_directory: Path) -> dict[str, int]:
        raise OSError(5, "Input/output error")

    (tmp_path / UUID).mkdir()
    monkeypatch.setattr(checkpoint_gc, "remaining", fail)
    for globs in (["drop.me"], []):
        with pytest.raises(MasterError, match=r"cannot be deleted \(Input/output error\)"):
            delete_files(in_directory(tmp_path), UUID, globs)


def test_delete_files_by_pattern_does_not_follow_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    checkpoint = tmp_path / "ck" / UUID
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "model" / "w.pt").write_text("weights")
    (checkpoint / "meta.json").write_text("{}")
    (checkpoint / "link").symlink_to(outside)
    config = {"checkpoint_storage": {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "ck"}}

    assert delete_files(config, UUID, ["**/*.pt"]) == {"link": len(str(outside)), "meta.json": 2}
    assert delete_files(config, UUID) == {}
    assert (outside / "keep").exists()
    assert not checkpoint.exists()


@pytest.mark.parametrize("name", ["", "..", "../x", "runs", UUID.upper(), f"{UUID}/model"])
def test_delete_files_non_uuid_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir(parents=True, exist_ok=True)

    with pytest.raises(MasterError, match="expected a UUID in lower case"):
        delete_files(in_directory(tmp_path), name)

    assert (tmp_path / name).is_dir()


def test_delete_files_behind_link_is_refused(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "storage"
    outside.mkdir()
    (outside / "weights.pt").write_text("x")
    root.mkdir()
    (root / UUID).symlink_to(outside)

    with pytest.raises(MasterError, match="is a link"):
        delete_files(in_directory(root), UUID, ["*.pt"])

    assert (outside / "weights.pt").exists()


def test_checkpoint_directory_of_object_storage_is_refused() -> None:
    with pytest.raises(MasterError, match="expected shared_fs or directory"):
        checkpoint_directory({"type": "s3", "bucket": "b"}, UUID)
