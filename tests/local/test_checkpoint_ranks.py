"""Sharded checkpoints of two ranks in separate processes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from determined import core
from rank_processes import on_ranks

from dstrial.errors import CheckpointError
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.checkpoint_store import open_checkpoint_store
from dstrial.local.json_files import read_json

pytestmark = pytest.mark.process


def save_and_restore(dist: core.DistributedContext, path: Path) -> tuple[str, list[str]]:
    store = open_checkpoint_store(dist, path / "store")
    metadata = {"steps_completed": 5} if dist.rank == 0 else {"part": 1}
    with store.store_path(metadata, shard=True) as (target, name):
        (target / f"shard-{dist.rank}").write_text(str(dist.rank))
    with store.restore_path(name) as source:
        texts = [(source / f"shard-{rank}").read_text() for rank in range(2)]
    store.download(name, path / "copy")
    return name, texts


def test_checkpoint_of_two_ranks_is_restored_on_both(tmp_path: Path) -> None:
    (name, texts), other = on_ranks(2, save_and_restore, tmp_path)
    assert (name, texts) == other == (name, ["0", "1"])
    (checkpoint,) = list_checkpoints(tmp_path / "store")
    assert (checkpoint.uuid, checkpoint.steps_completed) == (name, 5)
    assert read_json(checkpoint.path / "metadata.json") == {"steps_completed": 5, "part": 1}
    assert (tmp_path / "copy" / "shard-1").read_text() == "1"


def fail_in_user_code(dist: core.DistributedContext, path: Path) -> None:
    with open_checkpoint_store(dist, path).store_path({"steps_completed": 1}, shard=True):
        if dist.rank == 1:
            raise KeyError("mine")


def fail_to_complete(dist: core.DistributedContext, path: Path) -> None:
    with open_checkpoint_store(dist, path).store_path({"steps_completed": 1}, shard=True):
        if dist.rank == 0:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))


def fail_to_begin(dist: core.DistributedContext, path: Path) -> None:
    store = open_checkpoint_store(dist, path / "store")
    dist.allgather(None)
    if dist.rank == 0:
        (path / "store").rmdir()
    dist.allgather(None)
    with store.store_path({"steps_completed": 1}, shard=True):
        pass


def disagree_about_metadata(dist: core.DistributedContext, path: Path) -> None:
    with open_checkpoint_store(dist, path).store_path({"steps_completed": dist.rank}, shard=True):
        pass


def upload_different_files(dist: core.DistributedContext, path: Path) -> None:
    upload_together(dist, path, [{"a": "1"}, {"a": "2"}])


def upload_a_file_that_vanishes(dist: core.DistributedContext, path: Path) -> None:
    for rank in range(2):
        (path / f"source-{rank}").mkdir(exist_ok=True)
        (path / f"source-{rank}" / "a").write_text("1")

    def is_selected(name: str) -> bool:
        if dist.rank == 1:
            (path / "source-1" / name).unlink()
        return True

    store = open_checkpoint_store(dist, path / "store")
    dist.allgather(None)
    store.upload(path / f"source-{dist.rank}", {"steps_completed": 1}, shard=True, selector=is_selected)


CHIEF_FULL = "rank 0: OSError: [Errno 27] File too large"
GONE = "a checkpoint could not be begun: rank {rank}: StorageGoneError: checkpoint storage "
VANISHED = "a checkpoint could not be listed: rank 1: FileNotFoundError"
METADATA = "refusing to upload with metadata conflicts"


@pytest.mark.parametrize(
    ("fail", "kinds", "messages"),
    [
        (fail_in_user_code, (CheckpointError, KeyError), ("rank 1: KeyError: 'mine'", "mine")),
        (fail_to_complete, (CheckpointError, CheckpointError), (CHIEF_FULL, CHIEF_FULL)),
        (fail_to_begin, (CheckpointError, CheckpointError), (GONE, GONE)),
        (upload_a_file_that_vanishes, (CheckpointError, CheckpointError), (VANISHED, VANISHED)),
        (disagree_about_metadata, (RuntimeError, RuntimeError), (METADATA, METADATA)),
        (upload_different_files, (CheckpointError, CheckpointError), ("file 'a' differs between ranks 0 and 1",) * 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_failure_on_one_rank_fails_all_without_leftovers(
    tmp_path: Path, fail: Callable[..., None], kinds: tuple[type[Exception], ...], messages: tuple[str, ...]
) -> None:
    for rank, error in enumerate(on_ranks(2, fail, tmp_path)):
        assert type(error) is kinds[rank]
        assert messages[rank].format(rank=rank) in str(error)
        assert ".." not in str(error)
    assert not [
        path for path in tmp_path.rglob("*") if path.name not in ("store", "source-0", "source-1", "a")
    ]


def upload_together(dist: core.DistributedContext, path: Path, contents: list[dict[str, str] | None]) -> str:
    mine = contents[dist.rank]
    source = None if mine is None else path / f"source-{dist.rank}"
    for name, text in (mine or {}).items():
        assert source is not None
        source.mkdir(exist_ok=True, parents=True)
        (source / name).write_text(text)
    return open_checkpoint_store(dist, path / "store").upload(source, {"steps_completed": 1}, shard=True)


@pytest.mark.parametrize("first", [{"a": "1", "same": "s"}, None])
def test_sharded_upload_is_union_of_rank_directories(tmp_path: Path, first: dict[str, str] | None) -> None:
    second = {"b": "2", "same": "s"}
    name, _ = on_ranks(2, upload_together, tmp_path, [first, second])
    stored = tmp_path / "store" / name
    found = {path.name: path.read_text() for path in stored.iterdir()}
    assert found.items() >= {**(first or {}), **second}.items()
