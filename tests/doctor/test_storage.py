import dataclasses
import os
from pathlib import Path

import pytest

from dstrial.doctor import storage
from dstrial.doctor.finding import Finding
from dstrial.doctor.storage import Directory

GIB = 1 << 30
MIB = 1 << 20
GOOD = Directory("state", "/data", "ext4", 500 * GIB, 10**7)


def judged(**changes):
    found = storage.judge_directory(dataclasses.replace(GOOD, **changes))
    return {finding.name: finding for finding in found if finding.status != "ok"}


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"error": "Permission denied"}, "state", "problem"),
        ({"free_bytes": 200 * MIB}, "state space", "problem"),
        ({"free_bytes": 5 * GIB}, "state space", "note"),
        ({"free_files": 12}, "state files", "problem"),
        ({"file_system": "nfs4"}, "state place", "note"),
    ],
)
def test_a_directory_that_is_not_fit_says_why(changes, name, status):
    (found,) = judged(**changes).values()
    assert (found.name, found.status) == (name, status)
    assert found.todo


def test_a_good_directory_is_ok():
    assert judged() == {}
    assert judged(free_files=None) == {}


def test_nothing_is_made_or_left_by_looking(tmp_path):
    first, second = storage.measure([("runs", tmp_path / "not" / "there"), ("temporary", Path("/dev/shm"))])
    assert list(tmp_path.iterdir()) == []
    assert (first.error, second.error) == ("", "")
    assert first.free_bytes > 0
    assert second.file_system == "tmpfs"


def test_a_place_below_a_file_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    (found,) = storage.measure([("runs", tmp_path / "file" / "runs")])
    assert "no directory" in found.error


@pytest.mark.skipif(os.getuid() == 0, reason="Requires: [an account that is not root]")
def test_a_directory_without_rights_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    (found,) = storage.measure([("runs", tmp_path)])
    assert found.error


def test_a_file_system_that_no_file_can_be_made_in_is_a_problem():
    (found,) = storage.measure([("runs", Path("/proc/runs"))])
    assert storage.judge([found])[0].status == "problem"


def test_findings_of_places_that_did_not_answer_stay_as_they_are():
    hanging = Finding("runs", "problem", "does not answer", "Choose another.")
    assert storage.judge([hanging, GOOD])[0] is hanging


def test_a_name_that_no_file_system_takes_is_a_problem_of_that_place_alone(tmp_path):
    first, second = storage.measure([("runs", tmp_path / ("x" * 300)), ("state", tmp_path)])
    assert storage.judge([first])[0].status == "problem"
    assert second.error == ""


@pytest.mark.skipif(os.getuid() != 0, reason="Requires: [root, to be somebody else for a while]")
def test_a_place_in_a_directory_that_only_others_may_enter_is_a_problem_of_that_place_alone(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    os.seteuid(65534)
    try:
        first, second = storage.measure([("runs", closed / "ours" / "runs"), ("temporary", Path("/dev/shm"))])
    finally:
        os.seteuid(0)
    assert "Permission denied" in storage.judge([first])[0].what
    assert second.error == ""
