"""Devices of ranks, with a fake accelerator that records DeepSpeed's calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from dstrial.errors import RankError
from dstrial.ranks.identity import RankIdentity, device_index, is_shared, may_share
from dstrial.testing.ranks import run_function


def identity(local_rank: int = 0, local_world_size: int = 2, num_nodes: int = 1) -> RankIdentity:
    world_size = local_world_size * num_nodes
    return RankIdentity(local_rank, world_size, local_rank, local_world_size, 0, num_nodes, "host", 1, "none")


@pytest.mark.parametrize(
    ("local_rank", "num_ranks", "num_devices", "shares", "index"),
    [
        (1, 2, 2, False, 1),
        (1, 2, 1, False, 0),  # the launcher makes one device visible to each rank
        (1, 2, 1, True, 0),
        (3, 4, 2, True, 1),
        (1, 2, 2, True, 1),
    ],
)
def test_device_index_is_local_rank_modulo_devices(
    local_rank: int, num_ranks: int, num_devices: int, shares: bool, index: int
) -> None:
    asked = identity(local_rank, num_ranks)
    assert device_index(asked, num_devices, "cuda", may_share=shares) == index


def test_too_many_ranks_error_suggests_three_fixes() -> None:
    with pytest.raises(
        RankError, match=r"Start 2 ranks here, .*DS_ACCELERATOR=cpu, .*DSTRIAL_SHARE_DEVICE=1"
    ):
        device_index(identity(2, 3), 2, "cuda", may_share=False)
    with pytest.raises(RankError, match="0 cuda devices"):
        device_index(identity(0, 1), 0, "cuda", may_share=True)


def test_device_sharing_must_be_allowed_and_needed() -> None:
    assert is_shared(identity(), 1, may_share=True)
    assert not is_shared(identity(), 1, may_share=False)
    assert not is_shared(identity(), 2, may_share=True)
    assert not is_shared(identity(0, 1), 1, may_share=True)
    assert is_shared(identity(0, 1, num_nodes=2), 1, may_share=True)  # the other node may have fewer devices


def test_share_device_variable_accepts_0_or_1() -> None:
    environments = ({}, {"DSTRIAL_SHARE_DEVICE": "0"}, {"DSTRIAL_SHARE_DEVICE": "1"})
    assert [may_share(environ) for environ in environments] == [False, False, True]
    with pytest.raises(RankError, match="DSTRIAL_SHARE_DEVICE is 'yes'; expected 0 or 1"):
        may_share({"DSTRIAL_SHARE_DEVICE": "yes"})


@pytest.mark.process
def test_accelerator_detection_keeps_forks_usable() -> None:
    program = Path(__file__).with_name("fork_program.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "usable\n", done.stdout + done.stderr


def test_num_slots_defaults_to_device_count(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dstrial.launch import slots
    from dstrial.ranks import identity

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(identity.glob, "glob", lambda path: [path] if "nvidia" in path else [])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # which would ask NVML
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert slots.num_slots(None, None) == 4
    assert (slots.num_slots(None, 3), slots.num_slots(2, 3)) == (3, 2)
    monkeypatch.setattr(identity.glob, "glob", lambda _path: [])
    assert slots.num_slots(None, None) == 1


def stand_in(calls: list[tuple[str, Any]], backend: str) -> None:
    """Replace DeepSpeed's accelerator by a fake CUDA one with one device."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.real_accelerator import set_accelerator

    class OneDevice(CPU_Accelerator):  # type: ignore[misc]  # deepspeed ships no types
        def device_name(self, device_index: int | None = None) -> str:
            return "cuda" if device_index is None else f"cuda:{device_index}"

        def device(self, device_index: int | None = None) -> None:
            calls.append(("bound", device_index))  # recorded only: torch without CUDA would raise

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None:
            calls.append(("set", device_index))

        def create_op_builder(self, class_name: str) -> None:
            return None  # the CPU accelerator's builder would compile collectives

        def communication_backend_name(self) -> str:
            return backend

    set_accelerator(OneDevice())


def start_on_the_only_visible_device() -> dict[str, Any]:
    import torch.distributed

    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group, shutdown

    calls: list[tuple[str, Any]] = []
    stand_in(calls, "gloo")
    before = dict(os.environ)
    who = identify(os.environ)
    init_process_group(who, timeout_s=60)
    torch.distributed.barrier()  # else the first rank to leave breaks pending connections of the other
    seen = {
        "calls": calls,
        "deepspeed's": os.environ["LOCAL_RANK"],
        "same identity": identify(os.environ) == who,
        "local rank": who.local_rank,
    }
    shutdown()
    return {**seen, "restored": {n: v for n, v in os.environ.items() if before.get(n) != v}}


@pytest.mark.process
def test_deepspeed_binds_only_visible_device() -> None:
    """Under ``srun --gpus-per-task=1`` each rank sees one device, ``cuda:0``.

    DeepSpeed 0.19.8 binds ``cuda:LOCAL_RANK``, except with torch releases that would hang (deepspeed/comm/torch.py:271).
    """
    import torch

    binds = not Version("2.6.0") < Version(torch.__version__) < Version("2.7.1")
    for local_rank, result in enumerate(run_function(start_on_the_only_visible_device, 2)):
        assert result.value == {
            "calls": [("set", 0), ("bound", 0)] if binds else [("set", 0)],
            "deepspeed's": "0",
            "same identity": True,
            "local rank": local_rank,
            "restored": {},
        }


def share_a_device() -> dict[str, Any]:
    import importlib

    import deepspeed.comm as dist
    import torch

    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import device, init_process_group, shutdown

    calls: list[tuple[str, Any]] = []
    stand_in(calls, "nccl")
    who = identify(os.environ)
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend
    native = (backend.send, backend.recv)
    init_process_group(who, timeout_s=60)
    copied: list[str] = []

    class OnDevice(torch.Tensor):
        """A CPU tensor that claims to be on the device and records copies to the host."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 0)

        def to(self, where: Any) -> torch.Tensor:  # type: ignore[override]
            copied.append(str(where))
            return self.as_subclass(torch.Tensor).clone()

    total = torch.full((3,), float(who.rank + 1)).as_subclass(OnDevice)
    dist.all_reduce(total)
    message = torch.full((2,), float(who.rank)).as_subclass(OnDevice)
    version = message._version
    if who.rank == 0:
        dist.send(message, 1)  # must not modify the tensor: autograd may need its value
        assert message._version == version
    else:
        dist.recv(message, 0)
    subgroup = dist.new_group([0])
    seen = {
        "backend": torch.distributed.get_backend(),
        "total": total.as_subclass(torch.Tensor).tolist(),
        "message": message.as_subclass(torch.Tensor).tolist(),
        "copies": copied,
        "device": str(device(who)),
        "calls": calls,
        "member": torch.distributed.get_rank(subgroup),
    }
    shutdown()
    return {**seen, "undone": (backend.send, backend.recv) == native}


@pytest.mark.process
def test_ranks_sharing_device_use_gloo_and_warn_once() -> None:
    results = run_function(share_a_device, 2, env={"DSTRIAL_SHARE_DEVICE": "1"})
    for rank, result in enumerate(results):
        assert result.value == {
            "backend": "gloo",
            "total": [3.0] * 3,
            "message": [0.0] * 2,
            "copies": ["cpu"] if rank == 0 else [],
            "device": "cuda:0",
            "calls": [("set", 0), ("set", 0)],
            "member": 0 if rank == 0 else -1,
            "undone": True,
        }
    told = [result.stderr.count("2 ranks of this machine share cuda:0 over gloo") for result in results]
    assert told == [1, 0]
