"""Checkpoints that several ranks save together: real processes, Determined's own gathers."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from determined import core
from rank_processes import names_in, on_ranks

from dstrial.errors import CheckpointError, RankError
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.checkpoint_store import LocalCheckpointContext, open_checkpoint_store
from dstrial.local.json_files import read_json

pytestmark = pytest.mark.process


def save_together(dist: core.DistributedContext, path: Path) -> str:
    store = open_checkpoint_store(dist, path)
    with store.store_path({"steps_completed": 5} if dist.rank == 0 else {"part": 1}, shard=True) as (
        target,
        name,
    ):
        (target / f"shard-{dist.rank}").write_text(str(dist.rank))
    return name


def test_every_rank_saves_its_part_of_one_checkpoint(tmp_path: Path) -> None:
    names = on_ranks(2, save_together, tmp_path)
    assert names[0] == names[1]
    (checkpoint,) = list_checkpoints(tmp_path)
    assert (checkpoint.uuid, checkpoint.steps_completed) == (names[0], 5)
    assert sorted(entry.name for entry in checkpoint.path.glob("shard-*")) == ["shard-0", "shard-1"]
    assert read_json(checkpoint.path / "metadata.json") == {"steps_completed": 5, "part": 1}


def save_twice_with_a_full_disk_between(
    dist: core.DistributedContext, path: Path, failing_rank: int
) -> list[Any]:
    store = open_checkpoint_store(dist, path)

    def save(steps_completed: int, is_full: bool) -> str:
        with store.store_path({"steps_completed": steps_completed}, shard=True) as (target, name):
            (target / f"shard-{dist.rank}").write_text("x")
            if is_full and dist.rank == failing_rank:
                Path("/dev/full").write_text("x")
        return name

    first = save(1, False)
    try:
        save(2, True)
        message = None
    except CheckpointError as error:
        message = str(error)
    left = names_in(path) if dist.rank == 0 else None
    return [first, message, left, save(3, False)]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_the_next_checkpoint_works(
    tmp_path: Path, failing_rank: int
) -> None:
    answers = on_ranks(2, save_twice_with_a_full_disk_between, tmp_path, failing_rank)
    for first, message, left, third in answers:
        assert message.startswith(f"a checkpoint could not be saved in {tmp_path}")
        assert f"rank {failing_rank}: OSError" in message
        assert "No space left on device" in message
        assert "bytes free" in message
        assert left in (None, [first])
        assert {entry.uuid for entry in list_checkpoints(tmp_path)} == {first, third}


def fail_in_user_code(dist: core.DistributedContext, path: Path) -> None:
    with open_checkpoint_store(dist, path).store_path({"steps_completed": 1}, shard=True):
        if dist.rank == 1:
            raise KeyError("mine")


def test_an_error_of_the_user_is_itself_on_its_rank_and_named_on_the_others(tmp_path: Path) -> None:
    chief, worker = on_ranks(2, fail_in_user_code, tmp_path)
    assert isinstance(worker, KeyError)
    assert isinstance(chief, CheckpointError)
    assert "rank 1: KeyError: 'mine'" in str(chief)
    assert names_in(tmp_path) == []


def fail_while_a_peer_waits_in_its_part(dist: core.DistributedContext, path: Path) -> str:
    store = LocalCheckpointContext(dist, path, failure_wait_s=0.2)
    try:
        with store.store_path({"steps_completed": 1}, shard=True) as _:
            if dist.rank == 1:
                Path("/dev/full").write_text("x")
            while not (path / "rank 1 gave up").exists():
                time.sleep(0.01)
            return "saved"
    except CheckpointError as error:
        (path / "rank 1 gave up").touch()
        dist.allgather(None)
        return str(error)


def test_a_rank_that_cannot_save_does_not_wait_for_ever_for_peers_that_wait_for_it(tmp_path: Path) -> None:
    chief, worker = on_ranks(2, fail_while_a_peer_waits_in_its_part, tmp_path)
    assert "rank 1: OSError: [Errno 28] No space left on device" in worker
    assert "ranks [0] have not ended their part" in worker
    assert list_checkpoints(tmp_path) == []
    assert isinstance(chief, Exception)


def fail_to_complete(dist: core.DistributedContext, path: Path) -> None:
    with open_checkpoint_store(dist, path).store_path({"steps_completed": 1}, shard=True):
        if dist.rank == 0:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))


def test_a_chief_that_cannot_complete_the_checkpoint_tells_the_workers(tmp_path: Path) -> None:
    for error in on_ranks(2, fail_to_complete, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "rank 0: OSError: [Errno 27] File too large" in str(error)
    assert list_checkpoints(tmp_path) == []
    assert names_in(tmp_path) == []


def fail_to_begin(dist: core.DistributedContext, path: Path) -> None:
    store = open_checkpoint_store(dist, path)
    dist.allgather(None)
    if dist.rank == 0:
        path.rmdir()
    with store.store_path({"steps_completed": 1}, shard=True):
        pass


def test_a_chief_that_cannot_begin_tells_the_workers(tmp_path: Path) -> None:
    for error in on_ranks(2, fail_to_begin, tmp_path / "store"):
        assert isinstance(error, CheckpointError)
        assert "a checkpoint could not be begun: rank 0: StorageGoneError: checkpoint storage " in str(error)
        assert ".." not in str(error)


def disagree_about_metadata(dist: core.DistributedContext, path: Path) -> None:
    with open_checkpoint_store(dist, path).store_path({"steps_completed": dist.rank}, shard=True):
        pass


def test_metadata_that_differs_between_ranks_is_an_error_on_all(tmp_path: Path) -> None:
    for error in on_ranks(2, disagree_about_metadata, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "has different values on ranks" in str(error)
    assert names_in(tmp_path) == []


def save_alone(dist: core.DistributedContext, path: Path) -> Any:
    store = open_checkpoint_store(dist, path)
    try:
        with store.store_path({"steps_completed": 1}) as (_, name):
            return name
    finally:
        dist.allgather(None)


def test_saving_without_shards_is_for_the_chief(tmp_path: Path) -> None:
    chief, worker = on_ranks(2, save_alone, tmp_path)
    assert [entry.uuid for entry in list_checkpoints(tmp_path)] == [chief]
    assert isinstance(worker, RankError)


def upload_together(dist: core.DistributedContext, path: Path, contents: list[dict[str, str] | None]) -> str:
    mine = contents[dist.rank]
    source = None if mine is None else path / f"source-{dist.rank}"
    for name, text in (mine or {}).items():
        assert source is not None
        source.mkdir(exist_ok=True, parents=True)
        (source / name).write_text(text)
    return open_checkpoint_store(dist, path / "store").upload(source, {"steps_completed": 1}, shard=True)


def test_an_upload_is_the_union_of_the_ranks_directories(tmp_path: Path) -> None:
    names = on_ranks(2, upload_together, tmp_path, [{"a": "1", "same": "s"}, {"b": "2", "same": "s"}])
    stored = tmp_path / "store" / names[0]
    assert {name: (stored / name).read_text() for name in ("a", "b", "same")} == {
        "a": "1",
        "b": "2",
        "same": "s",
    }


def test_a_rank_without_a_directory_takes_part_in_an_upload(tmp_path: Path) -> None:
    names = on_ranks(2, upload_together, tmp_path, [None, {"b": "2"}])
    assert (tmp_path / "store" / names[0] / "b").read_text() == "2"


def test_different_files_of_one_name_are_an_error_on_all(tmp_path: Path) -> None:
    for error in on_ranks(2, upload_together, tmp_path, [{"a": "1"}, {"a": "2"}]):
        assert isinstance(error, CheckpointError)
        assert "file 'a' differs between ranks 0 and 1" in str(error)
    assert names_in(tmp_path / "store") == []


def restore_together(dist: core.DistributedContext, path: Path) -> list[str]:
    name = save_together(dist, path / "store")
    store = open_checkpoint_store(dist, path / "store")
    with store.restore_path(name) as source:
        texts = [(source / f"shard-{rank}").read_text() for rank in range(2)]
    store.download(name, path / "copy")
    return texts


def test_every_rank_restores_from_the_one_directory(tmp_path: Path) -> None:
    assert on_ranks(2, restore_together, tmp_path) == [["0", "1"], ["0", "1"]]
    assert (tmp_path / "copy" / "shard-1").read_text() == "1"
