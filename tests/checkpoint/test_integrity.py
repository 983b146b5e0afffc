import os
import pathlib
from collections.abc import Callable

import pytest

from dstrial.checkpoint.completion_marker import write_marker
from dstrial.checkpoint.integrity import bytes_to_read, check_integrity, damaged_error, verify_files
from dstrial.checkpoint.manifest import Manifest, hash_files, read_manifest, write_manifest
from dstrial.errors import CheckpointNotFoundError

FILES = {"model0/a.pt": b"a" * 4000, "model0/b.pt": b"b" * 5000, "dstrial_rank1.pt": b"state"}
FIRST = "model0/a.pt"


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    files = hash_files(tmp_path, FILES)
    write_manifest(tmp_path, Manifest.build(steps_completed=1, layouts=[], files=files))
    return tmp_path


def append(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


def flip_a_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_directory(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda path: os.truncate(path, 3999), "truncated", "3,999 bytes; expected 4,000 bytes"),
        (append, "longer", "4,001 bytes; expected 4,000 bytes"),
        (flip_a_bit, "changed", "SHA-256 "),
        (pathlib.Path.unlink, "missing", "no file; expected 4,000 bytes"),
        (replace_by_directory, "missing", "no file; expected 4,000 bytes"),
    ],
)
def test_damaged_file_is_named(
    root: pathlib.Path, damage: Callable[[pathlib.Path], None], kind: str, words: str
) -> None:
    damage(root / FIRST)
    (found,) = verify_files(root, read_manifest(root))
    assert (found.path, found.kind) == (FIRST, kind)
    assert str(found).startswith(f"{FIRST} is {kind}: {words}")


def test_check_integrity_reads_every_byte_once(root: pathlib.Path) -> None:
    seen: list[int] = []
    found = check_integrity(root, on_bytes=seen.append)
    assert found.is_intact
    assert (found.num_files, found.num_bytes, sum(seen)) == (3, 9005, 9005)
    assert bytes_to_read(read_manifest(root)) == 9005


def test_faults_are_in_manifest_order_unexpected_last(root: pathlib.Path) -> None:
    (root / "model0" / "b.pt").write_bytes(b"b" * 4999 + b"c")
    append(root / FIRST)
    (root / "dstrial_rank1.pt").write_bytes(b"")
    (root / "code").mkdir()
    (root / "code" / "x.py").write_text("1")
    faults = check_integrity(root).faults
    assert [(fault.path, fault.kind) for fault in faults] == [
        ("dstrial_rank1.pt", "truncated"),
        (FIRST, "longer"),
        ("model0/b.pt", "changed"),
        ("code/x.py", "unexpected"),
    ]
    error = str(
        damaged_error(root, verify_files(root, read_manifest(root), only=[FIRST, "dstrial_rank1.pt"]))
    )
    assert "dstrial_rank1.pt is truncated: 0 bytes; expected 5 bytes" in error
    assert "model0/a.pt is longer: 4,001 bytes; expected 4,000 bytes" in error
    assert "model0/b.pt" not in error


def test_missing_marker_is_fault_only_on_request(root: pathlib.Path) -> None:
    assert check_integrity(root).is_intact
    (fault,) = check_integrity(root, needs_mark=True).faults
    assert (fault.path, fault.kind) == ("COMPLETE", "incomplete")
    write_marker(root)
    (root / "metadata.json").write_text("{}")
    assert check_integrity(root, needs_mark=True).is_intact
    (root / "COMPLETE").write_text("{")
    (fault,) = check_integrity(root, needs_mark=True).faults
    assert (fault.path, fault.kind) == ("COMPLETE", "changed")


def test_check_integrity_without_manifest_raises(root: pathlib.Path) -> None:
    (root / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError):
        check_integrity(root)
