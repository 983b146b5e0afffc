"""Device slots found through a fake NVML, and variables that select devices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from rows import allocation_request

from dstrial.errors import MasterError
from dstrial.master.backends.devices import Slot, nvml_slots, shared_slots
from dstrial.master.backends.environment import cluster_info_files, trial_environment


@dataclasses.dataclass
class Gpu:
    uuid: str
    name: str = "NVIDIA H200"


def fake_nvml(*gpus: Gpu) -> Any:
    """Return a fake ``pynvml`` for these GPUs, which has only functions of pynvml."""
    functions: dict[str, Any] = {
        "nvmlDeviceGetCount": lambda: len(gpus),
        "nvmlDeviceGetHandleByIndex": lambda index: gpus[index],
        "nvmlDeviceGetUUID": lambda handle: handle.uuid,
        "nvmlDeviceGetName": lambda handle: handle.name,
    }
    assert functions.keys() <= vars(pynvml).keys()
    return SimpleNamespace(**functions)


A, B = Gpu("GPU-aaaa1111"), Gpu("GPU-bbbb2222")


def test_whole_gpus_are_slots_by_nvml_index() -> None:
    assert list(nvml_slots(fake_nvml(A, B), None)) == [
        Slot(0, "cuda", "NVIDIA H200", "GPU-aaaa1111", "0"),
        Slot(1, "cuda", "NVIDIA H200", "GPU-bbbb2222", "1"),
    ]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("", []),
        ("1,0", [B.uuid, A.uuid]),
        ("GPU-bbbb, 0", [B.uuid, A.uuid]),
        ("7", []),
        ("MIG-1,MIG-2", ["MIG-1", "MIG-2"]),
    ],
)
def test_cuda_visible_devices_selects_and_orders_slots(visible: str, uuids: list[str]) -> None:
    slots = list(nvml_slots(fake_nvml(A, B), visible))
    assert [slot.uuid for slot in slots] == uuids
    assert [slot.id for slot in slots] == list(range(len(uuids)))


def test_shared_slots_assign_devices_round_robin(caplog: pytest.LogCaptureFixture) -> None:
    found = tuple(nvml_slots(fake_nvml(A, B), None))
    slots = shared_slots(found, 3)
    assert [(slot.id, slot.uuid) for slot in slots] == [(0, A.uuid), (1, B.uuid), (2, A.uuid)]
    assert "DSTRIAL_SHARE_DEVICE=1: 3 slots of 2 devices" in caplog.text


def environment(*slots: Slot, **base: str) -> dict[str, str]:
    request = allocation_request(Path("/nowhere"), slots=slots)
    return trial_environment(request, marker="m", temporary_directory=Path("/tmp"), base=base)


def test_shared_device_is_visible_once() -> None:
    (slot,) = nvml_slots(fake_nvml(A), None)
    for slots, shares in (((slot,), None), (shared_slots((slot,), 2), "1")):
        env = environment(*slots)
        assert env["CUDA_VISIBLE_DEVICES"].count(",") == 0
        assert env.get("DSTRIAL_SHARE_DEVICE") == shares


def test_find_slots_beyond_devices_requires_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrial.master.backends import devices

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(devices, "_cuda", lambda: nvml_slots(fake_nvml(A), None))
    with pytest.raises(MasterError, match=r"--slots is 2; expected at most 1.*DSTRIAL_SHARE_DEVICE=1"):
        devices.find_slots(2)
    monkeypatch.setenv("DSTRIAL_SHARE_DEVICE", "1")
    assert [slot.uuid for slot in devices.find_slots(2)] == [A.uuid, A.uuid]
    assert len(devices.find_slots(None)) == 1


# Two of four GPUs, as seen by a master that was started with CUDA_VISIBLE_DEVICES=3,1.
THIRD = Slot(0, "cuda", "NVIDIA", "GPU-3333", "3")
FIRST = Slot(1, "cuda", "NVIDIA", "GPU-1111", "1")


def test_deepspeed_finds_nvml_index_in_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    env = environment(THIRD, FIRST, CUDA_VISIBLE_DEVICES="3,1", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env["CUDA_VISIBLE_DEVICES"])

    indices = [CUDA_Accelerator()._get_nvml_gpu_id(index) for index in range(2)]

    assert indices == [3, 1]
    # NVML orders GPUs by PCI bus; CUDA's default order is fastest first.
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    uuids = cluster_info_files(allocation_request(Path("/nowhere"), slots=(THIRD, FIRST)))["resources.json"][
        "gpu_uuids"
    ]
    assert uuids == ["GPU-3333", "GPU-1111"]


def test_free_memory_by_uuid_comes_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from dstrial.ranks.process_group import ask_torch_for_free_memory

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1111,GPU-3333")
    with pytest.raises(ValueError, match="invalid literal for int"):
        CUDA_Accelerator()._get_nvml_gpu_id(0)
    monkeypatch.setattr(CUDA_Accelerator, "available_memory", CUDA_Accelerator.available_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 + (device or 0), 5000))

    ask_torch_for_free_memory()

    accelerator = CUDA_Accelerator()
    assert (accelerator.available_memory(), accelerator.available_memory(1)) == (1000, 1001)


def test_available_memory_is_unpatched_for_numeric_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from dstrial.ranks.process_group import ask_torch_for_free_memory

    before = CUDA_Accelerator.available_memory
    for value in (environment(THIRD)["CUDA_VISIBLE_DEVICES"], "", "0, 1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        ask_torch_for_free_memory()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ask_torch_for_free_memory()
    assert CUDA_Accelerator.available_memory is before


def test_rocm_environment_sets_only_hip_visible_devices() -> None:
    slots = (Slot(0, "rocm", "AMD", "2"), Slot(1, "rocm", "AMD", "3"))

    env = environment(*slots, ROCR_VISIBLE_DEVICES="2,3", CUDA_VISIBLE_DEVICES="2,3")

    chosen = {name: value for name, value in env.items() if name.endswith("_VISIBLE_DEVICES")}
    assert chosen == {"HIP_VISIBLE_DEVICES": "2,3"}
