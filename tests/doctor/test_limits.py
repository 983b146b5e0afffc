import dataclasses

import pytest

from dstrial.doctor import limits
from dstrial.doctor.limits import Limits

GIB = 1 << 30
MIB = 1 << 20
AMPLE = Limits(
    cores=16,
    core_quota=None,
    memory_bytes=128 * GIB,
    available_bytes=100 * GIB,
    shm_bytes=64 * GIB,
    shm_free_bytes=64 * GIB,
    shm_is_writable=True,
    open_files=(65536, 1048576),
    num_processes=None,
    locked_bytes=None,
    has_infiniband=False,
)


def judged(num_devices=0, environ=None, **changes):
    found = limits.judge(dataclasses.replace(AMPLE, **changes), environ or {}, num_devices=num_devices)
    return {finding.name: finding for finding in found if finding.status != "ok"}


def test_ample_limits_are_ok():
    assert judged() == {}


@pytest.mark.parametrize(
    ("changes", "name", "status", "mends"),
    [
        ({"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}, "/dev/shm", "problem", "--shm-size"),
        ({"shm_bytes": 0, "shm_free_bytes": 0}, "/dev/shm", "problem", "tmpfs"),
        ({"shm_is_writable": False}, "/dev/shm", "problem", "tmpfs"),
        ({"shm_free_bytes": 100 * MIB}, "/dev/shm", "problem", "ls -l /dev/shm"),
        ({"open_files": (64, 1048576)}, "open files", "problem", "ulimit -n 65536"),
        ({"open_files": (1024, 4096)}, "open files", "note", "ulimit -n 4096"),
        ({"open_files": (256, 256)}, "open files", "problem", "limits.conf"),
        ({"num_processes": 100}, "processes", "problem", "nproc"),
        ({"num_processes": 1024}, "processes", "note", "nproc"),
        ({"locked_bytes": 8 * MIB, "has_infiniband": True}, "locked memory", "problem", "memlock"),
        ({"available_bytes": GIB // 2}, "memory", "problem", "container"),
        ({"available_bytes": 2 * GIB}, "memory", "note", "workers"),
        ({"core_quota": 1.5}, "cores", "note", "--slots 1"),
    ],
)
def test_a_limit_that_is_too_small_says_so_and_what_to_do(changes, name, status, mends):
    (found,) = judged(**changes).values()
    assert (found.name, found.status) == (name, status)
    assert mends in found.todo


def test_shared_memory_must_do_for_every_device():
    enough = {"shm_bytes": 900 * MIB, "shm_free_bytes": 800 * MIB}
    assert judged(**enough) == {}
    assert "/dev/shm" in judged(num_devices=8, **enough)


def test_limits_that_do_not_bind_are_ok():
    assert judged(locked_bytes=8 * MIB) == {}
    assert judged(core_quota=1.5, environ={"OMP_NUM_THREADS": "1"}) == {}
    assert judged(core_quota=16.0) == {}


@pytest.mark.parametrize(
    ("files", "groups", "expected"),
    [
        ({"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 1.5),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "200000 100000"}, "0::/a/b\n", 2.0),
        ({"a/cpu.max": "max 100000"}, "0::/a\n", None),
        ({"cpu.max": "200000 100000"}, "0::/host/path/that/is/not/mounted/here\n", 2.0),
        (
            {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/x\n3:memory:/y\n",
            0.5,
        ),
        ({"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, "4:cpu:/x\n", None),
    ],
)
def test_the_quota_of_control_groups_is_read_in_both_versions(tmp_path, files, groups, expected):
    for name, content in files.items():
        path = tmp_path / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    own = tmp_path / "cgroup"
    own.write_text(groups)
    assert limits.core_quota(own, tmp_path / "mounted") == expected
    assert limits.core_quota(tmp_path / "missing", tmp_path) is None
