import dataclasses
from pathlib import Path

import pytest

from dstrial.doctor import limits
from dstrial.doctor.limits import Limits, check_directories, judge_directory

GIB = 1 << 30
MIB = 1 << 20
AMPLE = Limits(available_bytes=100 * GIB, shm_free_bytes=64 * GIB, open_files=(65536, 1048576))


@pytest.mark.parametrize(
    ("changes", "name", "status", "mends"),
    [
        ({"shm_free_bytes": 64 * MIB}, "/dev/shm", "problem", "--shm-size"),
        ({"shm_free_bytes": 0}, "/dev/shm", "problem", "tmpfs"),
        ({"open_files": (64, 1048576)}, "open files", "problem", "ulimit -n 65536"),
        ({"open_files": (1024, 4096)}, "open files", "note", "ulimit -n 4096"),
        ({"open_files": (256, 256)}, "open files", "problem", "limits.conf"),
        ({"available_bytes": GIB // 2}, "memory", "problem", "container"),
        ({"available_bytes": 2 * GIB}, "memory", "note", "workers"),
    ],
)
def test_small_limit_is_reported_with_its_fix(changes, name, status, mends):
    assert {one.status for one in limits.judge_limits(AMPLE)} == {"ok"}
    found = limits.judge_limits(dataclasses.replace(AMPLE, **changes))
    (found,) = [one for one in found if one.status != "ok"]
    assert (found.name, found.status) == (name, status)
    assert mends in found.todo


@pytest.mark.parametrize(
    ("file_system", "free_bytes", "name", "status"),
    [
        ("ext4", 200 * MIB, "state", "problem"),
        ("ext4", 5 * GIB, "state", "note"),
        ("nfs4", 500 * GIB, "state place", "note"),
    ],
)
def test_unfit_directory_is_reported(file_system, free_bytes, name, status):
    *_, found = judge_directory("state", Path("/data"), file_system, free_bytes)
    assert (found.name, found.status) == (name, status)
    assert found.todo
    assert len(judge_directory("runs", Path("/data"), "nfs4", 500 * GIB)) == 1


def test_directories_are_checked_without_creating_anything(tmp_path):
    first, *_ = check_directories([("runs", tmp_path / "not" / "there")])
    assert (first.name, first.status) == ("runs", "ok")
    assert "tmpfs" in check_directories([("temporary", Path("/dev/shm"))])[0].what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file/runs", "x" * 300, "/proc/runs"])
def test_unusable_directory_does_not_hide_others(tmp_path, name):
    (tmp_path / "file").touch()
    first, second, *_ = check_directories([("runs", tmp_path / name), ("temporary", Path("/dev/shm"))])
    assert (first.status, second.status) == ("problem", "ok")
    assert "cannot be used" in first.what
