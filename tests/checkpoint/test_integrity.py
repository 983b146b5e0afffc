import os
import pathlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dstrial.checkpoint.integrity import damaged_error, describe_damage, verify_files
from dstrial.checkpoint.manifest import Manifest, hash_files

FILES = {"model0/a.pt": b"a" * 4000, "model0/b.pt": b"b" * 5000, "dstrial_rank1.pt": b"state"}


def written(root: pathlib.Path) -> Manifest:
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return Manifest.build(
        steps_completed=1,
        layouts=[],
        files=hash_files(root, FILES),
        readers={"model0/a.pt": [0, 1, 2], "dstrial_rank1.pt": [1]},
    )


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def append(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes() + b"!")


def flip_a_bit(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: pathlib.Path) -> None:
    path.unlink()


def replace_by_directory(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


def test_an_undamaged_checkpoint_passes(tmp_path: pathlib.Path) -> None:
    assert verify_files(tmp_path, written(tmp_path)) == []


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (truncate, "size", "model0/a.pt is 3,999 bytes; expected 4,000 bytes"),
        (append, "size", "model0/a.pt is 4,001 bytes; expected 4,000 bytes"),
        (flip_a_bit, "checksum", "model0/a.pt is of checksum "),
        (remove, "missing", "model0/a.pt is missing; expected 4,000 bytes"),
        (replace_by_directory, "missing", "model0/a.pt is no file; expected 4,000 bytes"),
    ],
)
def test_damage_is_named_with_its_file_and_the_ranks_it_would_hit(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None], kind: str, words: str
) -> None:
    manifest = written(tmp_path)
    damage(tmp_path / "model0" / "a.pt")
    (found,) = verify_files(tmp_path, manifest)
    assert (found.path, found.kind, found.reader_ranks) == ("model0/a.pt", kind, (0, 1, 2))
    assert describe_damage(found).startswith(words)
    assert describe_damage(found).endswith("(read by ranks 0, 1, 2)")


def test_the_error_names_every_damaged_file(tmp_path: pathlib.Path) -> None:
    manifest = written(tmp_path)
    remove(tmp_path / "dstrial_rank1.pt")
    truncate(tmp_path / "model0" / "b.pt")
    error = damaged_error(tmp_path, verify_files(tmp_path, manifest))
    assert "dstrial_rank1.pt is missing; expected 5 bytes (read by rank 1)" in str(error)
    assert "model0/b.pt is 4,999 bytes; expected 5,000 bytes" in str(error)


def test_only_the_files_asked_for_are_looked_at(tmp_path: pathlib.Path) -> None:
    manifest = written(tmp_path)
    remove(tmp_path / "model0" / "a.pt")
    assert verify_files(tmp_path, manifest, only=["model0/b.pt"]) == []
    assert len(verify_files(tmp_path, manifest, only=["model0/a.pt"])) == 1


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted(FILES)), where=st.integers(min_value=0), bit=st.integers(0, 7))
def test_any_single_flipped_bit_is_found(tmp_path: pathlib.Path, name: str, where: int, bit: int) -> None:
    manifest = written(tmp_path)
    content = bytearray(FILES[name])
    content[where % len(content)] ^= 1 << bit
    (tmp_path / name).write_bytes(content)
    assert [damage.path for damage in verify_files(tmp_path, manifest)] == [name]
