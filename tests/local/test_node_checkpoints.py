"""Checkpoints in a bucket of an S3 server, from ranks on one or two nodes."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from determined import core
from object_store import Bucket
from rank_processes import names_in, on_ranks

from dstrial.errors import CheckpointError, CheckpointNotFoundError
from dstrial.local.checkpoint_directory import KeepPolicy, list_checkpoints
from dstrial.local.checkpoint_store import LocalCheckpointContext, open_checkpoint_store
from dstrial.object_storage import external_storage

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


@pytest.fixture
def storage(bucket: Bucket) -> Iterator[dict[str, Any]]:
    yield bucket.storage() | bucket.keys_in_config
    for key in bucket.objects():
        bucket.client().delete_object(Bucket=bucket.name, Key=key)


def opened(dist: core.DistributedContext, path: Path, storage: dict[str, Any], **options: Any) -> Any:
    settings = external_storage({"checkpoint_storage": storage})
    return open_checkpoint_store(dist, path / "checkpoints", settings=settings, **options)


def save(store: LocalCheckpointContext, rank: int, steps_completed: int) -> str:
    with store.store_path({"steps_completed": steps_completed}, shard=True) as (target, name):
        (target / f"shard-{rank}").write_text(str(rank))
        if rank == 0:
            (target / "both").mkdir(exist_ok=True)
    return name


def save_and_restore(dist: core.DistributedContext, path: Path, storage: dict[str, Any]) -> Any:
    tempfile.tempdir = str(path / f"node-{dist.cross_rank}")
    store = opened(dist, path, storage)
    name = save(store, dist.rank, 5)
    with store.restore_path(name) as source:
        texts = [(source / f"shard-{rank}").read_text() for rank in range(dist.size)]
        place = source.parents[1].name
    store.download(name, path / f"copy-{dist.cross_rank}", selector=lambda name: name == f"shard-{dist.rank}")
    store.close()
    return name, texts, place


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_each_node_uploads_own_files_downloads_all(
    tmp_path: Path, bucket: Bucket, storage: dict[str, Any], num_nodes: int
) -> None:
    for node in range(num_nodes):
        (tmp_path / f"node-{node}").mkdir()

    answers = on_ranks(2, save_and_restore, tmp_path, storage, num_nodes=num_nodes, deadline_s=300)

    name = answers[0][0]
    assert [texts for _, texts, _ in answers] == [["0", "1"]] * 2
    assert [place for _, _, place in answers] == [f"node-{rank * num_nodes // 2}" for rank in range(2)]
    assert bucket.objects() == [
        f"of/mine/{name}/{part}" for part in ("COMPLETE", "both/", "metadata.json", "shard-0", "shard-1")
    ]
    (record,) = list_checkpoints(tmp_path / "checkpoints")
    assert names_in(record.path) == ["COMPLETE", "metadata.json"]
    assert bucket.secret_key not in (record.path / "COMPLETE").read_text()
    for node in range(num_nodes):
        assert names_in(tmp_path / f"copy-{node}") == ["shard-0", "shard-1"]
        assert names_in(tmp_path / f"node-{node}") == []


def die_in_a_save(dist: core.DistributedContext, path: Path, storage: dict[str, Any]) -> None:
    store = opened(dist, path, storage)
    save(store, dist.rank, 1)
    with store.store_path({"steps_completed": 2}, shard=True) as (target, name):
        (target / "half").write_text("x")
        store._storage_manager.upload(target, name)
        os.kill(os.getpid(), signal.SIGKILL)


def test_objects_of_killed_save_are_deleted_at_start(
    tmp_path: Path, bucket: Bucket, storage: dict[str, Any]
) -> None:
    child = os.fork()
    if not child:
        die_in_a_save(core.DummyDistributedContext(), tmp_path, storage)
    os.waitpid(child, 0)
    assert any(key.endswith("/half") for key in bucket.objects())

    store = opened(core.DummyDistributedContext(), tmp_path, storage, keep=KeepPolicy(1, 0))

    (first,) = store.list()
    assert bucket.uuids() == {first.uuid}
    assert not any(key.endswith("/half") for key in bucket.objects())
    last = save(store, 0, 2)
    assert [found.uuid for found in store.list()] == [last]
    assert {key.split("/")[2] for key in bucket.objects()} == {last}
    store.delete(last)
    assert bucket.objects() == []
    store.close()


def test_checkpoint_is_found_by_uuid_only_if_complete(
    tmp_path: Path, bucket: Bucket, storage: dict[str, Any]
) -> None:
    """Another run finds a checkpoint only if it has the COMPLETE marker."""
    first = opened(core.DummyDistributedContext(), tmp_path / "first" / "runs" / "a" / "b", storage)
    name = save(first, 0, 3)
    second = opened(core.DummyDistributedContext(), tmp_path / "second" / "runs" / "a" / "b", storage)
    assert second.get_metadata(name) == {"steps_completed": 3}
    with second.restore_path(name) as path:
        assert (path / "shard-0").read_text() == "0"
    assert second.list() == []
    bucket.client().delete_object(Bucket=bucket.name, Key=f"of/mine/{name}/COMPLETE")
    third = opened(core.DummyDistributedContext(), tmp_path / "third" / "runs" / "a" / "b", storage)
    with pytest.raises(CheckpointNotFoundError, match="expected one that is complete"):
        third.get_metadata(name)
    for store in (first, second, third):
        store.close()


def test_unwritable_storage_fails_on_all_ranks(
    tmp_path: Path, bucket: Bucket, storage: dict[str, Any]
) -> None:
    answers = on_ranks(2, opened, tmp_path, storage | {"bucket": "missing"}, deadline_s=300)
    for answer in answers:
        assert isinstance(answer, CheckpointError)
        assert "NoSuchBucket" in str(answer)
        assert bucket.secret_key not in str(answer)
