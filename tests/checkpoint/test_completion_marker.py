import os
import pathlib

import pytest

from dstrial.checkpoint.completion_marker import (
    MARKER_NAME,
    fsync_tree,
    incomplete,
    is_complete,
    read_marker,
    remove_marker,
    write_marker,
)
from dstrial.errors import CheckpointDamagedError, CheckpointNotFoundError


def test_directory_with_completion_marker_is_complete(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "weights.pt").write_bytes(b"w")
    assert not is_complete(tmp_path)
    write_marker(tmp_path, {"steps_completed": 3})
    assert is_complete(tmp_path)
    assert read_marker(tmp_path) == {"steps_completed": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == [MARKER_NAME, "model0"]
    remove_marker(tmp_path)
    remove_marker(tmp_path)
    assert not is_complete(tmp_path)


def test_write_marker_fsyncs_files_before_marker_appears(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model0").mkdir()
    (tmp_path / "model0" / "weights.pt").write_bytes(b"w")
    events: list[str] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        path = pathlib.Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(f"{path.name}{'' if is_complete(tmp_path) else ' (unmarked)'}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    write_marker(tmp_path)
    root = tmp_path.name
    assert events == [
        "weights.pt (unmarked)",
        "model0 (unmarked)",
        f"{root} (unmarked)",
        f"{MARKER_NAME}.tmp (unmarked)",
        root,
        tmp_path.parent.name,
    ]


def test_failed_fsync_leaves_no_marker(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights.pt").write_bytes(b"w")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_marker(tmp_path)
    assert not is_complete(tmp_path)


def test_incomplete_lists_directories_without_marker(tmp_path: pathlib.Path) -> None:
    for name in ("b", "a", "done"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    write_marker(tmp_path / "done")
    assert incomplete(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert incomplete(tmp_path / "nowhere") == []


def test_missing_or_malformed_marker_raises(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=MARKER_NAME):
        read_marker(tmp_path)
    for content in ("", "[]"):
        (tmp_path / MARKER_NAME).write_text(content)
        with pytest.raises(CheckpointDamagedError, match=MARKER_NAME):
            read_marker(tmp_path)


def test_fsync_tree_accepts_broken_symlink(tmp_path: pathlib.Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    fsync_tree(tmp_path)
