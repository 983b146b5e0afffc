import pathlib

import pytest

from dstrial.checkpoint.completion_marker import write_marker
from dstrial.checkpoint.integrity import bytes_to_read, check_integrity
from dstrial.checkpoint.manifest import Manifest, hash_files, write_manifest
from dstrial.errors import CheckpointNotFoundError

FILES = {"model0/a.pt": b"a" * 4000, "model0/b.pt": b"b" * 5000, "dstrial_rank1.pt": b"state"}


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    files = hash_files(tmp_path, FILES)
    manifest = Manifest.build(
        steps_completed=1, layouts=[], files=files, readers={"model0/a.pt": [0, 1], "dstrial_rank1.pt": [1]}
    )
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_every_byte_is_read_once_and_reported(root: pathlib.Path) -> None:
    seen: list[int] = []
    found = check_integrity(root, on_bytes=seen.append)
    assert found.is_intact
    assert (found.num_files, found.num_bytes, sum(seen)) == (3, 9005, 9005)


def test_faults_come_in_the_order_of_the_manifest_and_strays_last(root: pathlib.Path) -> None:
    (root / "model0" / "b.pt").write_bytes(b"b" * 4999 + b"c")
    (root / "model0" / "a.pt").write_bytes(b"a" * 4001)
    (root / "dstrial_rank1.pt").write_bytes(b"")
    (root / "code").mkdir()
    (root / "code" / "x.py").write_text("1")
    assert [(fault.path, fault.kind) for fault in check_integrity(root).faults] == [
        ("dstrial_rank1.pt", "truncated"),
        ("model0/a.pt", "longer"),
        ("model0/b.pt", "changed"),
        ("code/x.py", "unexpected"),
    ]


def test_a_fault_says_whose_file_it_is_and_who_reads_it(root: pathlib.Path) -> None:
    (root / "dstrial_rank1.pt").unlink()
    (root / "model0" / "a.pt").write_bytes(b"")
    own, shared = check_integrity(root).faults
    assert str(own) == (
        "dstrial_rank1.pt (rank state of rank 1) is missing: missing; expected 5 bytes; read by rank 1"
    )
    assert str(shared) == "model0/a.pt is truncated: 0 bytes; expected 4,000 bytes; read by ranks 0, 1"


def test_the_mark_is_asked_for_only_where_it_makes_a_checkpoint(root: pathlib.Path) -> None:
    assert check_integrity(root).is_intact
    (fault,) = check_integrity(root, needs_mark=True).faults
    assert (fault.path, fault.kind) == ("COMPLETE", "incomplete")
    write_marker(root)
    assert check_integrity(root, needs_mark=True).is_intact
    (root / "COMPLETE").write_text("{")
    (fault,) = check_integrity(root, needs_mark=True).faults
    assert (fault.path, fault.kind) == ("COMPLETE", "changed")


def test_the_mark_and_the_metadata_are_no_strays(root: pathlib.Path) -> None:
    write_marker(root)
    (root / "metadata.json").write_text("{}")
    assert check_integrity(root).is_intact


def test_without_a_manifest_there_is_nothing_to_compare_with(root: pathlib.Path) -> None:
    (root / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFoundError):
        check_integrity(root)


def test_the_bytes_to_read_are_known_before(root: pathlib.Path) -> None:
    from dstrial.checkpoint.manifest import read_manifest

    assert bytes_to_read(read_manifest(root)) == 9005
