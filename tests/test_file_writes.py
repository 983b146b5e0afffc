"""Atomic file writes and deletion of directory trees."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from stubborn_trees import make_deep, nobody_changes

from dstrial.file_writes import make_file, remove_tree, replace_file


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("content", ["grün\n", b"\x00\xff"])
def test_replace_file_leaves_no_temporary_file(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "file"
    for sync in (True, False):
        path.write_bytes(b"longer than what replaces it")
        replace_file(path, content, sync=sync)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert names_in(tmp_path) == ["file"]


def test_private_file_mode_ignores_umask_and_old_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("open to all")
    path.chmod(0o666)
    before = os.umask(0)
    try:
        replace_file(path, "secret", is_private=True)
        assert mode_of(path) == 0o600
        replace_file(path, "open")
        assert mode_of(path) == 0o666
        make_file(tmp_path / "made", "secret")
        assert mode_of(tmp_path / "made") == 0o600
    finally:
        os.umask(before)


def test_replace_file_fails_cleanly_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "inside").touch()

    with pytest.raises(OSError, match="file"):
        replace_file(tmp_path / "file", "text")

    assert names_in(tmp_path) == ["file"]
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".other.{os.getpid()}.tmp").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(tmp_path / "other", "text")
    assert victim.read_text() == "mine"


def test_make_file_succeeds_for_single_concurrent_writer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    told: list[str] = []
    start = threading.Barrier(8)

    def make(number: int) -> None:
        start.wait()
        try:
            make_file(path, f"{number}")
            told.append(f"{number}")
        except FileExistsError:
            told.append("")

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [one for one in told if one] == [path.read_text()]
    assert names_in(tmp_path) == ["file"]


@pytest.mark.process
def test_remove_tree_deletes_very_deep_tree(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    top = tmp_path / "top"
    make_deep(top)
    (top / "link").symlink_to(outside)
    os.mkfifo(top / "pipe")

    remove_tree(top)
    remove_tree(top)

    assert names_in(tmp_path) == ["outside"]
    assert names_in(outside) == ["file"]


def test_remove_tree_of_link_keeps_target(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "file").touch()
    (tmp_path / "link").symlink_to("target")

    remove_tree(tmp_path / "link", is_forced=True)

    assert names_in(tmp_path) == ["target"]
    assert names_in(tmp_path / "target") == ["file"]


@pytest.mark.process
def test_remove_tree_deletes_rest_after_failure(tmp_path: Path) -> None:
    kept = tmp_path / "top" / "kept"
    kept.mkdir(parents=True)
    (kept / "file").touch()
    make_deep(tmp_path / "top" / "other", 3)

    with nobody_changes(kept), pytest.raises(PermissionError):
        remove_tree(tmp_path / "top")

    assert names_in(tmp_path / "top") == ["kept"]
    assert names_in(kept) == ["file"]
