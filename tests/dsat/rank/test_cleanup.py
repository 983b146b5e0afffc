"""Taking a configuration out of a process: in which order, and what of torch's settings comes back."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from dstrial.dsat.rank.cleanup import Settings, _read
from dstrial.testing.ranks import run_function


def in_order() -> dict[str, Any]:
    """Take out a configuration with a group of its own, beside an accelerator that records what it is asked."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator, real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    calls: list[str] = []
    from dstrial.ranks.identity import identify
    from dstrial.ranks.process_group import init_process_group

    init_process_group(identify(os.environ), timeout_s=60)

    class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # deepspeed ships no types
        generator = torch.Generator().manual_seed(3)

        def device_name(self, device_index: int | None = None) -> str:
            return "cuda"

        def synchronize(self, device_index: int | None = None) -> None:
            calls.append("synchronize")

        def empty_cache(self) -> None:
            calls.append("empty_cache")

        def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
            return self.generator.get_state()

        def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
            self.generator.set_state(new_state)

    cpu = get_accelerator()
    real_accelerator.set_accelerator(Accelerator())
    from dstrial.dsat.rank import cleanup

    assert cleanup.get_accelerator() is not cpu
    state = cleanup.ProcessState()
    dist.barrier(group=dist.new_group([0, 1]))  # no rank destroys it while another one still connects
    destroy = dist.destroy_process_group

    def recorded(group: Any = None) -> None:
        calls.append("destroy")
        destroy(group)

    dist.destroy_process_group = recorded
    drawn = []
    for _ in range(2):
        drawn.append(
            (torch.rand(1, generator=Accelerator.generator).item(), random.random(), torch.rand(1).item())
        )
        state.restore([])
    first = drawn[0] == drawn[1]
    dist.destroy_process_group = destroy
    real_accelerator.set_accelerator(cpu)
    dist.destroy_process_group()
    return {"calls": calls, "random states are back": first}


@pytest.mark.process
def test_the_device_is_waited_for_before_groups_end_and_its_random_state_comes_back() -> None:
    for result in run_function(in_order, 2):
        assert result.value == {
            "calls": ["synchronize", "destroy", "empty_cache", "synchronize", "empty_cache"],
            "random states are back": True,
        }


def _set(path: str, value: Any) -> None:
    *owners, attribute = path.split(".")
    owner: Any = torch.backends
    for name in owners:
        owner = getattr(owner, name)
    setattr(owner, attribute, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cuda.matmul.fp32_precision", "tf32"),
        ("fp32_precision", "tf32"),
        ("cudnn.conv.fp32_precision", "ieee"),
        ("cuda.matmul.allow_tf32", True),
        ("cudnn.allow_tf32", False),
        ("cudnn.benchmark", True),
        ("cudnn.deterministic", True),
        ("cudnn.enabled", False),
        ("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_settings_restore_backend_settings(path: str, value: Any) -> None:
    """After the newer names of TF32 were used, torch 2.13 refuses to be asked by the older ones until they are undone."""
    if "fp32_precision" in path and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("Requires: [torch 2.9]")
    before = Settings()
    try:
        _set(path, value)
        assert _changed(before)
    finally:
        before.restore()
    assert not _changed(before)
    assert torch.get_float32_matmul_precision() == "highest"


def test_settings_restore_kernels_determinism_and_environment() -> None:
    before = Settings()
    try:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.bfloat16)
        os.environ["SET_BY_A_TRIAL"] = "1"
        os.chdir("/")
    finally:
        before.restore()
    assert not _changed(before)
    assert not torch.are_deterministic_algorithms_enabled()


def _changed(settings: Settings) -> bool:
    return any(_read(read) != value for read, _, value in settings._values)
