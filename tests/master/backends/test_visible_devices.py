"""What the master sets for a trial's devices, read by those who read it there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrial.master.backends.devices import Slot
from dstrial.master.backends.environment import cluster_info_files, trial_environment
from dstrial.master.backends.request import AllocationRequest

# Of a machine with four, to a master that was started with CUDA_VISIBLE_DEVICES=3,1.
THIRD = Slot(0, "cuda", "NVIDIA", "GPU-3333", "3")
FIRST = Slot(1, "cuda", "NVIDIA", "GPU-1111", "1")
INSTANCES = tuple(Slot(i, "cuda", "NVIDIA MIG", f"MIG-{i}", f"MIG-{i}") for i in range(2))


def request(*slots: Slot) -> AllocationRequest:
    numbers = dict.fromkeys(("trial_id", "experiment_id", "run_id", "trial_seed", "steps_completed"), 1)
    texts = dict.fromkeys(
        (
            *("allocation_id", "task_id", "session_token", "user_token", "username", "cluster_id"),
            *("master_id", "agent_id", "resources_id"),
        ),
        "x",
    )
    fields: dict[str, Any] = {
        **{"directory": Path("/nowhere"), "slots": slots, "ports": {}, "config": {}, "hparams": {}},
        **{"latest_checkpoint": None, "model_definition": b"", "entrypoint": ""},
        **{"master_url": "http://127.0.0.1:8080", **numbers, **texts},
    }
    return AllocationRequest(**fields)


def environment(*slots: Slot, **base: str) -> dict[str, str]:
    return trial_environment(request(*slots), marker="m", temporary_directory=Path("/tmp"), base=base)


def test_deepspeed_finds_nvmls_index_in_what_the_master_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    env = environment(THIRD, FIRST, CUDA_VISIBLE_DEVICES="3,1", CUDA_DEVICE_ORDER="FASTEST_FIRST")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env["CUDA_VISIBLE_DEVICES"])

    indices = [CUDA_Accelerator()._get_nvml_gpu_id(index) for index in range(2)]

    assert indices == [3, 1]
    # NVML's indices are those of the PCI bus; CUDA's own default is the fastest first.
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    uuids = cluster_info_files(request(THIRD, FIRST))["resources.json"]["gpu_uuids"]
    assert uuids == ["GPU-3333", "GPU-1111"]


@pytest.mark.parametrize("slots", [INSTANCES, (THIRD, *INSTANCES)])
def test_free_memory_of_instances_which_have_no_index_is_asked_of_torch(
    slots: tuple[Slot, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from dstrial.ranks.process_group import ask_torch_for_free_memory

    env = environment(*slots)
    assert env["CUDA_VISIBLE_DEVICES"] == ",".join(slot.uuid for slot in slots)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", env["CUDA_VISIBLE_DEVICES"])
    with pytest.raises(ValueError, match="invalid literal for int"):
        CUDA_Accelerator()._get_nvml_gpu_id(0)
    monkeypatch.setattr(CUDA_Accelerator, "available_memory", CUDA_Accelerator.available_memory)
    # There is no instance here to be asked.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 + (device or 0), 5000))

    ask_torch_for_free_memory()

    accelerator = CUDA_Accelerator()
    assert (accelerator.available_memory(), accelerator.available_memory(1)) == (1000, 1001)


def test_deepspeeds_own_method_stays_where_it_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from dstrial.ranks.process_group import ask_torch_for_free_memory

    before = CUDA_Accelerator.available_memory
    for value in (environment(THIRD)["CUDA_VISIBLE_DEVICES"], "", "0, 1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        ask_torch_for_free_memory()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ask_torch_for_free_memory()
    assert CUDA_Accelerator.available_memory is before


def test_devices_of_rocm_are_chosen_once() -> None:
    slots = (Slot(0, "rocm", "AMD", "2"), Slot(1, "rocm", "AMD", "3"))

    env = environment(*slots, ROCR_VISIBLE_DEVICES="2,3", CUDA_VISIBLE_DEVICES="2,3")

    chosen = {name: value for name, value in env.items() if name.endswith("_VISIBLE_DEVICES")}
    assert chosen == {"HIP_VISIBLE_DEVICES": "2,3"}
