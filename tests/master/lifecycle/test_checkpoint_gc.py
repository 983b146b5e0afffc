"""Which checkpoints are kept, and what is deleted of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.errors import MasterError
from dstrial.master.lifecycle.checkpoint_gc import Candidate, Policy, delete_files, plan

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
def test_best_and_newest_are_kept(policy: Policy, smaller_is_better: bool, deleted: str) -> None:
    assert plan(CANDIDATES, policy, smaller_is_better=smaller_is_better) == deleted.split()


def test_of_equals_the_earlier_is_better_as_in_a_run_directory() -> None:
    equal = [
        Candidate("later", 1, 20, 0.5),
        Candidate("earlier", 1, 10, 0.5),
        Candidate("newest", 1, 30, 0.7),
    ]
    assert plan(equal, Policy(0, 1, 1), smaller_is_better=True) == ["later"]
    assert plan(equal, Policy(1, 0, 1), smaller_is_better=True) == ["later"]


def test_files_are_deleted_by_pattern_and_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("x")
    checkpoint = tmp_path / "ck" / "uuid"
    (checkpoint / "model").mkdir(parents=True)
    (checkpoint / "model" / "w.pt").write_text("weights")
    (checkpoint / "meta.json").write_text("{}")
    (checkpoint / "link").symlink_to(outside)
    storage = {"type": "shared_fs", "host_path": str(tmp_path), "storage_path": "ck"}

    assert delete_files(storage, "uuid", ["**/*.pt"]) == {"link": len(str(outside)), "meta.json": 2}
    assert delete_files(storage, "uuid") == {}
    assert (outside / "keep").exists()
    assert not checkpoint.exists()


def test_a_uuid_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MasterError, match="without slashes"):
        delete_files({"type": "directory", "container_path": str(tmp_path)}, "../x")
    with pytest.raises(MasterError, match="expected shared_fs or directory"):
        delete_files({"type": "s3", "bucket": "b"}, "uuid")
