import os
import pathlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    readers = {FIRST: [0, 1, 2], "dstrial_rank1.pt": [1]}
    files = hash_files(tmp_path, FILES)
    write_manifest(tmp_path, Manifest.build(steps_completed=1, layouts=[], files=files, readers=readers))
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
def test_damaged_file_is_named_with_its_readers(
    root: pathlib.Path, damage: Callable[[pathlib.Path], None], kind: str, words: str
) -> None:
    damage(root / FIRST)
    (found,) = verify_files(root, read_manifest(root))
    assert (found.path, found.kind, found.reader_ranks) == (FIRST, kind, (0, 1, 2))
    assert str(found).startswith(f"{FIRST} is {kind}: {words}")
    assert str(found).endswith("; read by ranks 0, 1, 2")


def test_damaged_error_names_every_file(root: pathlib.Path) -> None:
    (root / "dstrial_rank1.pt").unlink()
    os.truncate(root / "model0" / "b.pt", 4999)
    error = str(damaged_error(root, verify_files(root, read_manifest(root))))
    assert "dstrial_rank1.pt is missing: no file; expected 5 bytes; read by rank 1" in error
    assert "model0/b.pt is truncated: 4,999 bytes; expected 5,000 bytes" in error


def test_verify_files_compares_only_given_names(root: pathlib.Path) -> None:
    (root / FIRST).unlink()
    manifest = read_manifest(root)
    assert verify_files(root, manifest, only=["model0/b.pt"]) == []
    assert len(verify_files(root, manifest, only=[FIRST])) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FILES)), where=st.integers(min_value=0), bit=st.integers(0, 7))
def test_any_single_flipped_bit_is_found(root: pathlib.Path, name: str, where: int, bit: int) -> None:
    content = bytearray(FILES[name])
    content[where % len(content)] ^= 1 << bit
    (root / name).write_bytes(content)
    assert [fault.path for fault in verify_files(root, read_manifest(root))] == [name]
    (root / name).write_bytes(FILES[name])


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
    assert str(faults[0]) == (
        "dstrial_rank1.pt (rank state of rank 1) is truncated: 0 bytes; expected 5 bytes; read by rank 1"
    )


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
