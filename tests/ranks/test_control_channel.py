"""The control channel between real gloo ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from dstrial.launch.failures import is_peer_error
from dstrial.testing.ranks import run_function

pytestmark = pytest.mark.process


def _channel(timeout_s: float = 60.0) -> Any:
    import torch.distributed

    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return ControlChannel(identify(os.environ), timeout_s=timeout_s)


def exchange() -> dict[str, Any]:
    channel = _channel()
    rank = channel.rank
    long_text = "x" * (5_000 * (rank + 1))
    seen = {
        "allgather": channel.allgather({"rank": rank}),
        "mixed": channel.allgather(long_text if rank == 1 else None),
        "gather": channel.gather(rank),
        "broadcast": channel.broadcast("from chief" if rank == 0 else "not me"),
        "broadcast_long": channel.broadcast(long_text),
        "local": (channel.allgather_local(rank), channel.gather_local(rank), channel.broadcast_local(rank)),
        "attributes": (channel.size, channel.local_size, channel.cross_size, channel._is_chief),
        "limit": channel.allgather("y" * 1003),
    }
    channel.close()
    channel.close()
    return seen


def exchange_concurrently() -> dict[str, Any]:
    channel = _channel()
    rank = channel.rank
    seen: dict[str, Any] = {"short": [], "long": [], "between": []}
    for number in range(50):
        if rank == number % 2:
            time.sleep(0.002)
        pending = channel.begin_allgather((rank, number))
        seen["between"].append((channel.allgather(-number), channel.broadcast(number + rank)))
        long_pending = channel.begin_allgather("x" * (2000 * rank + number)) if number == 7 else None
        seen["short"].append(pending.wait())
        if long_pending is not None:
            seen["between"].append((channel.allgather("y" * 3000)[1][:1], channel.broadcast(number)))
            seen["long"] = [len(text) for text in long_pending.wait()]
    pending = channel.begin_allgather(rank)
    channel.allgather(None)
    seen["last"] = pending.wait()
    channel.close()
    return seen


def error_of(operation: Any) -> str:
    from dstrial.errors import RankError

    try:
        operation()
    except RankError as error:
        return f"{type(error).__name__}: {error}"
    return "completed"


def begin_without_rank_1() -> str:
    """Return rank 0's timeout error; rank 1 is alive but late."""
    channel = _channel(timeout_s=3.0)
    if channel.rank == 1:
        time.sleep(8)
        return ""
    pending = channel.begin_allgather("alone")  # non-blocking, so it raises nothing
    return error_of(pending.wait)


def call_different_operations() -> str:
    channel = _channel(timeout_s=3.0)
    operation = channel.allgather if channel.rank == 0 else channel.broadcast
    message = error_of(lambda: operation("a value"))
    time.sleep(3)
    return message


def wait_for_rank_that_leaves() -> str:
    import torch.distributed

    channel = _channel(timeout_s=12.0)
    if channel.rank == 1:
        channel.leave("the upload failed")
    message = "left" if channel.rank == 1 else error_of(lambda: channel.allgather(None))
    torch.distributed.barrier()  # keeps the connections of the channel open while rank 0 waits
    return message


def use_as_determineds_context(directory: str) -> list[Any]:
    from determined import core

    channel = _channel()
    with core.init(distributed=channel, checkpoint_storage=directory) as context:
        with context.checkpoint.store_path({"steps_completed": 1}, shard=True) as (path, uuid):
            (Path(path) / f"rank{channel.rank}").write_text("here")
        assert not context.preempt.should_preempt()
        stored = Path(directory) / uuid
        return [context.distributed.allgather(channel.rank), sorted(p.name for p in stored.glob("rank*"))]


def use_two_ranks(directory: str) -> dict[str, Any]:
    import torch.distributed

    seen: dict[str, Any] = {}
    for function in (
        exchange,
        exchange_concurrently,
        begin_without_rank_1,
        call_different_operations,
        wait_for_rank_that_leaves,
    ):
        seen[function.__name__] = function()
        torch.distributed.barrier()
    seen["core"] = use_as_determineds_context(directory)
    torch.distributed.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = str(tmp_path_factory.mktemp("storage"))
    return [result.value for result in run_function(use_two_ranks, 2, directory)]


def test_values_of_any_length_reach_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(two_ranks):
        assert found["exchange"] == {
            "allgather": [{"rank": 0}, {"rank": 1}],
            "mixed": [None, "x" * 10_000],
            "gather": [0, 1] if rank == 0 else None,
            "broadcast": "from chief",
            "broadcast_long": "x" * 5_000,
            "local": ([0, 1], [0, 1] if rank == 0 else None, 0),
            "attributes": (2, 2, 1, rank == 0),
            "limit": ["y" * 1003] * 2,
        }


def test_pending_allgather_is_independent_of_other_operations(two_ranks: list[dict[str, Any]]) -> None:
    seen, other = (found["exchange_concurrently"] for found in two_ranks)
    assert seen == other
    assert seen["short"] == [[(0, number), (1, number)] for number in range(50)]
    assert seen["long"] == [7, 2007]
    assert seen["last"] == [0, 1]
    between = [pair for pair in seen["between"] if pair != ("y", 7)]
    assert between == [([-number, -number], number) for number in range(50)]


def test_pending_allgather_timeout_names_missing_rank(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["begin_without_rank_1"].startswith(
        "RankTimeoutError: allgather (operation 4 of the control channel) is still without rank 1 after 3 s"
    )


def test_mismatched_operations_name_ranks_and_calls(two_ranks: list[dict[str, Any]]) -> None:
    errors = [found["call_different_operations"] for found in two_ranks]
    assert any("rank 0 in allgather, rank 1 in broadcast" in error for error in errors)


def test_allgather_after_rank_left_raises_error(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["wait_for_rank_that_leaves"] for found in two_ranks] == [
        "RankError: allgather cannot complete without a rank that has left; rank 1: the upload failed",
        "left",
    ]


def test_determined_core_api_accepts_control_channel(two_ranks: list[dict[str, Any]]) -> None:
    assert [found["core"] for found in two_ranks] == [[[0, 1], ["rank0", "rank1"]]] * 2


def set_machines() -> int:
    """Simulate machines with two ranks each; return this rank."""
    rank = int(os.environ["RANK"])
    on_machine = min(2, int(os.environ["WORLD_SIZE"]) - rank // 2 * 2)
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE=str(on_machine))
    os.environ.update(GROUP_RANK=str(rank // 2), GROUP_WORLD_SIZE="2")
    return rank


def count_collective_splits() -> list[str]:
    """Return the communicator splits that the creation of a channel requests.

    A gloo backend stands in for NCCL with a bound device. In torch 2.13 (distributed_c10d.py:2030-2058) ranks outside a new
    group call ``perform_nocolor_split``, in which NCCL waits for all ranks; members of a gloo group never call it.
    """
    rank = set_machines()
    import torch
    import torch.distributed as dist

    calls: list[str] = []

    class Splitting(dist.ProcessGroupGloo):
        supports_splitting = True

        def perform_nocolor_split(self, device: Any) -> None:
            calls.append(str(device))

    kept: list[Any] = []  # else pybind loses the Python subclass

    def create(store: Any, group_rank: int, size: int, timeout: Any) -> Any:
        kept.append(Splitting(store, group_rank, size, timeout=timeout))
        return kept[-1]

    dist.Backend.register_backend("splitting", create, devices=["cpu", "cuda"])
    dist.init_process_group("splitting")
    dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    channel = _channel(timeout_s=20.0)
    local = channel.allgather_local(rank)
    channel.close()
    return [*calls, f"local {local}"]


def test_multi_node_channel_splits_no_communicator() -> None:
    results = run_function(count_collective_splits, 4)
    assert [result.value for result in results] == [["local [0, 1]"]] * 2 + [["local [2, 3]"]] * 2


def groups_of_unequal_number() -> list[Any]:
    """Create a second channel after ranks have joined different numbers of groups."""
    rank = set_machines()
    import torch.distributed as dist

    first = _channel(timeout_s=20.0)
    own = dist.new_group([0, 2], backend="gloo")
    second = _channel(timeout_s=20.0)
    seen = [
        (channel.allgather_local(rank), channel.gather_local(rank), channel.broadcast_local(rank))
        for channel in (second, first)
    ]
    second.close()
    first.close()
    dist.destroy_process_group(own)
    return seen


def test_channel_creation_tolerates_unequal_group_counts() -> None:
    results = run_function(groups_of_unequal_number, 4)
    local = [([0, 1], [0, 1], 0), ([0, 1], None, 0), ([2, 3], [2, 3], 2), ([2, 3], None, 2)]
    assert [result.value for result in results] == [[seen] * 2 for seen in local]


def miss_a_rank(missing: int, directory: str) -> str:
    channel = _channel(timeout_s=3.0)
    channel.allgather("all are here")
    if channel.rank == missing:
        time.sleep(12)
        os._exit(0)
    message = error_of(lambda: channel.allgather("where are you"))
    # Rank 0 hosts the store that knows the missing ranks, so it waits until the others have queried it.
    Path(directory, str(channel.rank)).touch()
    give_up_at_s = time.monotonic() + 30
    while channel.rank == 0 and len(list(Path(directory).iterdir())) < 2 and time.monotonic() < give_up_at_s:
        time.sleep(0.01)
    return message


def test_allgather_timeout_names_missing_rank(tmp_path: Path) -> None:
    missing = 0
    results = run_function(miss_a_rank, 3, missing, str(tmp_path))
    for result in results:
        if result.rank != missing:
            assert f"is still without rank {missing} after 3 s" in result.value
            assert "expected all 3 ranks" in result.value


def lose_a_peer() -> str:
    channel = _channel()
    if channel.rank == 1:
        os._exit(3)
    return error_of(lambda: channel.allgather("still there?"))


def test_allgather_distinguishes_dead_from_late_peer() -> None:
    survivor, dead = run_function(lose_a_peer, 2, check=False)
    assert dead.exit_code == 3
    assert survivor.value.startswith("RankError: allgather is broken on rank 0")
    assert is_peer_error(survivor.value)
    assert "Look for the traceback of the rank that failed first." in survivor.value


def test_single_rank_needs_no_process_group() -> None:
    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify

    channel = ControlChannel(identify({}))
    assert (
        channel.allgather(1)
        == channel.gather(1)
        == channel.allgather_local(1)
        == channel.gather_local(1)
        == [1]
    )
    assert (channel.broadcast(2), channel.broadcast_local(3)) == (2, 3)
    assert channel.get_size() == channel.get_num_agents() == 1
    channel.close()


@pytest.mark.parametrize("text", ["soon", "0", "-1"])
def test_timeout_variable_must_be_positive_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrial.errors import RankError
    from dstrial.ranks.control_channel import timeout_from_environ

    monkeypatch.setenv("DSTRIAL_TIMEOUT_S", text)
    with pytest.raises(RankError, match=f"DSTRIAL_TIMEOUT_S is '{text}'"):
        timeout_from_environ()
    monkeypatch.setenv("DSTRIAL_TIMEOUT_S", "2.5")
    assert timeout_from_environ() == 2.5
