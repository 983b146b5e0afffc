"""Start and shutdown of DeepSpeed's process group in separate processes."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrial.testing.ranks import free_port, run_function, run_script

sys.path.insert(0, str(Path(__file__).parents[1] / "security"))

from listening import listeners

pytestmark = pytest.mark.process


def start_alone() -> dict[str, Any]:
    for name in [
        n for n in os.environ if n.startswith(("RANK", "WORLD", "LOCAL_", "GROUP_", "MASTER_", "DS_"))
    ]:
        del os.environ[name]
    before = dict(os.environ)
    import torch.distributed as dist

    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import device, init_process_group, shutdown

    identity = identify(os.environ)
    seen: list[Any] = []
    for _ in range(2):
        init_process_group(identity, timeout_s=30)
        init_process_group(identity, timeout_s=30)
        seen.append((dist.get_world_size(), dist.get_backend(), str(device(identity)), os.environ["RANK"]))
        shutdown()
        shutdown()
        assert not dist.is_initialized()
    left = {
        name for name in os.environ.keys() - before.keys() if name.startswith(("RANK", "MASTER", "LOCAL_"))
    }
    return {"seen": seen, "left": left, "accelerator": os.environ["DS_ACCELERATOR"]}


def test_single_rank_group_restarts_and_restores_environment() -> None:
    (result,) = run_function(start_alone, 1)
    assert result.value == {"seen": [(1, "gloo", "cpu", "0")] * 2, "left": set(), "accelerator": "cpu"}


def respect_the_users_own_group() -> list[bool]:
    import torch.distributed as dist

    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group, shutdown

    os.environ["DET_MANUAL_INIT_DISTRIBUTED"] = "1"
    init_process_group(identify(os.environ), timeout_s=30)
    seen = [dist.is_initialized()]
    del os.environ["DET_MANUAL_INIT_DISTRIBUTED"]
    dist.init_process_group("gloo")
    init_process_group(identify(os.environ), timeout_s=30)
    shutdown()
    return [*seen, dist.is_initialized()]


def test_user_created_process_group_is_preserved() -> None:
    assert [result.value for result in run_function(respect_the_users_own_group, 2)] == [[False, True]] * 2


def start_on_a_taken_port() -> str:
    from dstrial.errors import RankError
    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group

    if os.environ["RANK"] == "1":  # would wait for rank 0
        return ""
    with socket.socket() as other_program:
        other_program.bind(("127.0.0.1", 0))
        other_program.listen()
        os.environ["MASTER_PORT"] = str(other_program.getsockname()[1])
        try:
            init_process_group(identify(os.environ), timeout_s=10)
        except RankError as error:
            return str(error)
    return ""


def test_master_port_in_use_error_suggests_fix() -> None:
    result, _ = run_function(start_on_a_taken_port, 2)
    assert "is in use by another program" in result.value
    assert "Set MASTER_PORT" in result.value


def start_without_rank_1() -> str:
    from dstrial.errors import RankTimeoutError
    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group

    if os.environ["RANK"] == "1":
        return ""
    try:
        init_process_group(identify(os.environ), timeout_s=2)
    except RankTimeoutError as error:
        return str(error)
    return "came up"


@pytest.mark.parametrize("through_file", [False, True])
def test_rendezvous_timeout_names_missing_rank(tmp_path: Path, through_file: bool) -> None:
    variables = store_of(tmp_path, num_ranks=2) if through_file else {}

    result, _ = run_function(start_without_rank_1, 2, env=variables)

    assert "still without rank 1 (this is rank 0)" in result.value


def listen_and_meet() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from dstrial.ranks.control_channel import ControlChannel
    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group, shutdown

    identity = identify(os.environ)
    sums: list[float] = []
    kinds: list[str] = []
    for _ in range(3):
        init_process_group(identity, timeout_s=60)
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        kinds.append(type(store).__name__)
        channel = ControlChannel(identity, timeout_s=60)
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(float(total) + sum(channel.allgather(identity.rank)))
        channel.close()
        listening = [str(listener) for listener in listeners([os.getpid()]) if not listener.is_loopback]
        shutdown()
    return {
        "sums": sums,
        "kinds": set(kinds),
        "outside": listening,
        "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


@pytest.mark.parametrize("through_file", [False, True])
def test_single_node_ranks_reconnect_on_loopback_only(tmp_path: Path, through_file: bool) -> None:
    variables = store_of(tmp_path, num_ranks=2) if through_file else {}

    results = run_function(listen_and_meet, 2, env=variables)

    kind = "FileStore" if through_file else "TCPStore"
    expected = {"sums": [3.0] * 3, "kinds": {kind}, "outside": [], "gloo": None}
    assert [result.value for result in results] == [expected] * 2
    # The last rank that leaves a group removes its file. If two ranks leave at once, both may keep it (the destructor in torch
    # 2.13's FileStore.cpp counts in two steps); the launcher later removes the file with its directory.
    assert {path.name for path in tmp_path.iterdir()} <= {"store-0", "store-1", "store-2"}


def store_of(directory: Path, num_ranks: int) -> dict[str, str]:
    port = free_port()
    value = {"path": str(directory / "store"), "port": port, "num_ranks": num_ranks}
    return {"DSTRIAL_STORE": json.dumps(value), "MASTER_PORT": str(port)}


def test_identify_does_not_import_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TEST_FORKS", "0")  # a fork has already imported torch
    script = tmp_path / "who.py"
    script.write_text(
        "import sys\n"
        "from dstrial.ranks.identity import identify\n"
        "from dstrial.ranks.stop_signals import StopSignals\n"
        "import os\n"
        "print(identify(os.environ).rank, 'torch' in sys.modules)\n"
    )
    assert [result.stdout for result in run_script(script, 2)] == ["0 False\n", "1 False\n"]


def gathered_at_once() -> list[float]:
    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group, shutdown

    init_process_group(identify(os.environ), timeout_s=60)
    import deepspeed
    import torch

    from dstrial.engine.deepspeed_internals import optimizers

    # The large parameter is still being gathered when the small one has arrived.
    model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 1))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10**9}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "zero_optimization": zero,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    least = []
    for value in (7.0, 8.0, 9.0):
        for param in engine.module.parameters():
            param.ds_tensor.fill_(value)
            param.data.fill_(value)
        optimizers.gather_persistent(engine.optimizer)
        least += [float(param.detach().min()) / value for param in engine.module.parameters()]
    shutdown()
    return least


@pytest.mark.ranks
def test_zero3_gathers_all_persistent_parameters() -> None:
    for result in run_function(gathered_at_once, 2, deadline_s=120):
        assert result.value == [1.0] * 12
