"""Packing of context directories, compared with Determined's client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from determined.common import constants, context

from dstrial.context_directory import (
    DEFAULT_PATTERNS,
    MAX_BYTES,
    OUTPUT_MARK,
    list_context,
    make_output_directory,
)
from dstrial.errors import ConfigError
from dstrial.local.run_directory import RunDirectory
from dstrial.storage_guard import STORAGE_MARKER


def write(root: Path, *names: str, size: int = 1) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.truncate(path, size)


def names_in(root: Path) -> set[str]:
    return {file.name for file in list_context(root).files}


def test_limits_and_patterns_equal_those_of_determined() -> None:
    assert list(DEFAULT_PATTERNS) == constants.DEFAULT_DETIGNORE
    assert MAX_BYTES == constants.MAX_CONTEXT_SIZE


def test_unmarked_context_packs_same_files_as_determined(tmp_path: Path) -> None:
    root = tmp_path / "context"
    write(
        root, "train.py", "a/b/deep.txt", "a/__pycache__/x.pyc", ".git/config", "shared_fs/x", "a/shared_fs/x"
    )
    write(root, "data/large.bin", "data/kept.bin", "logs/x.log", "notes.secret", "a/.detignore", "empty.txt")
    (root / ".detignore").write_text("# comment\n*.bin\n!kept.bin\nlogs/\n/notes.*\n")
    (root / "link.py").symlink_to("train.py")
    (root / "broken.py").symlink_to("nowhere")
    (root / "linked").symlink_to("a")

    expected = [(file.path, file.type, file.mode, file.content) for file in context.read_v1_context(root)]

    packed = list_context(root).v1_files()
    assert [(file.path, file.type, file.mode, file.content) for file in packed] == expected
    assert "data/kept.bin" in names_in(root)


def test_run_directories_are_never_packed(tmp_path: Path) -> None:
    root = tmp_path / "context"
    write(root, "train.py")
    (root / "older").mkdir()
    made = [
        RunDirectory.create(runs_dir, name="x", context_dir=root, command=[], config={}, path=path)
        for runs_dir, path in ((root / "runs", None), (root / "older", None), (root, root / "named"))
    ]
    made[1].path.rename(root / "kept")

    assert names_in(root) == {"train.py", "older"}
    assert set(list_context(root).left_out) == {"runs/", "older/x/", "named/", "kept/"}


@pytest.mark.parametrize("mark", [OUTPUT_MARK, STORAGE_MARKER, "pyvenv.cfg"])
def test_marked_directories_are_left_out_and_named(tmp_path: Path, mark: str) -> None:
    write(tmp_path, "train.py", f"deep/marked/{mark}", "deep/marked/more/file", "deep/file", mark)

    found = list_context(tmp_path)

    assert {file.name for file in found.files} == {"train.py", "deep", "deep/file", mark}
    assert found.left_out == ("deep/marked/",)


def test_existing_output_directory_is_not_marked(tmp_path: Path) -> None:
    make_output_directory(tmp_path)
    make_output_directory(tmp_path / "runs" / "doctor")

    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(OUTPUT_MARK)] == [
        f"runs/{OUTPUT_MARK}"
    ]


def test_too_large_context_error_names_largest_part(tmp_path: Path) -> None:
    write(tmp_path, "data/a.bin", size=MAX_BYTES)
    write(tmp_path, "train.py")
    with pytest.raises(ConfigError, match=r"has 95 MB, data/ alone 95 MB.*at most 95 MB.*\.detignore"):
        list_context(tmp_path).v1_files()

    (tmp_path / ".detignore").write_text("data/\n")
    assert [file.path for file in list_context(tmp_path).v1_files()] == ["train.py"]


def test_non_utf8_names_are_skipped_and_patterns_refused(tmp_path: Path) -> None:
    write(tmp_path, "train.py")
    (tmp_path / os.fsdecode(b"odd\xe9.txt")).touch()

    assert names_in(tmp_path) == {"train.py"}
    assert list_context(tmp_path).left_out == ("odd\\xe9.txt",)
    (tmp_path / ".detignore").write_bytes(b"caf\xe9/\n")

    with pytest.raises(ConfigError, match=r"\.detignore is no UTF-8 .*; expected patterns in UTF-8"):
        list_context(tmp_path)


@pytest.mark.process
def test_unreadable_directory_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "train.py", "private/secret")
    (tmp_path / "link").symlink_to(tmp_path / "private" / "secret")
    (tmp_path / "private").chmod(0)
    program = (
        "import sys, pathlib; from dstrial.context_directory import list_context; "
        "print([file.name for file in list_context(pathlib.Path(sys.argv[1])).files])"
    )
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []

    done = subprocess.run([*drop, sys.executable, "-c", program, tmp_path], capture_output=True, text=True)

    assert done.stdout.split() == ["['private',", "'train.py']"], done.stderr
