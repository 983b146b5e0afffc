"""Measure the peak of matrix products and train a GPT, whose FLOPs are counted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dstrial.doctor.training.programs.program import Program, deepspeed_config
from dstrial.doctor.training.programs.trial import TextTrial, train
from dstrial.engine.model_flops import counted_flops

_WARM, _TIMED = 8, 20
_SHAPES: dict[str, dict[str, Any]] = {
    "small": {"width": 128, "num_layers": 2, "num_heads": 4, "block_size": 64, "fused": True},
    "large": {"width": 1024, "num_layers": 16, "num_heads": 8, "block_size": 1024, "fused": True},
}
_ROOMY_BYTES = 40 * 2**30


class Timed(TextTrial):
    """Counts the FLOPs of its first micro batch and times the last ones."""

    began_s = 0.0
    seconds = 0.0
    flops = 0.0

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        """Train one batch."""
        if batch_idx == 0:
            found, self.flops, _ = counted_flops(
                lambda: super(Timed, self).train_batch(dataloader_iter, epoch_idx, batch_idx)
            )
            return found
        if batch_idx == _WARM:
            synchronise()
            self.began_s = time.perf_counter()
        found = super().train_batch(dataloader_iter, epoch_idx, batch_idx)
        if batch_idx == _WARM + _TIMED - 1:
            synchronise()
            self.seconds = (time.perf_counter() - self.began_s) / _TIMED
        return found


def synchronise() -> None:
    """Wait for the device, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def main() -> None:
    """Measure both."""
    program = Program("size")
    size = str(program.arguments.size)
    is_large = size == "large"
    device = torch.accelerator.current_accelerator() if is_large else torch.device("cpu")
    assert device is not None
    dtype = torch.bfloat16 if is_large else torch.float32
    program.note(doing="matrix products", dtype=str(dtype).removeprefix("torch."))
    peak = peak_flops(device, dtype, 8192 if is_large else 512)
    program.note(doing="training", peak_tflops=peak / 1e12)
    records = 4
    if (
        is_large
        and torch.cuda.is_available()
        and torch.cuda.get_device_properties(0).total_memory > _ROOMY_BYTES
    ):
        records = 16
    config = deepspeed_config(
        1,
        "bf16" if is_large else "fp32",
        train_micro_batch_size_per_gpu=records,
        zero_optimization={"stage": 1},
    )
    shape = _SHAPES[size]
    trial, _ = train(
        {
            "deepspeed_config": config,
            "shape": shape,
            "num_blocks": 64 * records if not is_large else 2 * 4 * records,
        },
        _WARM + _TIMED,
        trial_class=Timed,
    )
    program.note(
        doing="",
        parameters=sum(one.numel() for one in trial.model.parameters()),
        tokens_per_step=records * int(shape["block_size"]),
        counted_flops=trial.flops,
        step_ms=1e3 * trial.seconds,
        model_tflops=trial.flops / trial.seconds / 1e12,
        mfu=trial.flops / trial.seconds / peak,
        loss=float(trial.losses[-1]),
    )


def peak_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return FLOP/s of square matrix products, the best of several rounds."""
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    return 2.0 * size**3 / min(_seconds(lambda: left @ right) for _ in range(5))


def _seconds(call: Callable[[], object], times: int = 10) -> float:
    call()
    synchronise()
    found = []
    for _ in range(2):
        began_s = time.perf_counter()
        for _ in range(times):
            call()
        synchronise()
        found.append((time.perf_counter() - began_s) / times)
    return statistics.fmean(found)


if __name__ == "__main__":
    main()
