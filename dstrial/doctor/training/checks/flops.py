"""This device's peak of matrix products, and a small GPT's share of it (MFU).

The GPT's FLOPs are counted by torch's counter, forward and backward, without recomputation. On an accelerator it
has some 200 million parameters in bf16 and is expected at 10 to 70 % of the measured peak; on the CPU it is tiny, and the
figures say nothing of a device.
"""

from __future__ import annotations

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding

_LEAST, _MOST = 0.10, 0.70


def run(bench: Bench) -> Finding:
    """Measure."""
    launched = bench.launch("flops", "--size", "small" if bench.is_cpu else "large")
    found = launched.facts
    mfu = float(found["mfu"])
    told = (
        f"peak {found['peak_tflops']:.3g} TFLOP/s in {found['dtype']}; GPT of {found['parameters'] / 1e6:.0f} M parameters: "
        f"{found['step_ms']:.1f} ms a step, {found['model_tflops']:.3g} TFLOP/s, MFU {100 * mfu:.0f} %"
    )
    if not bench.is_cpu and not _LEAST <= mfu <= _MOST:
        raise CheckFailedError(
            f"{told}; expected {100 * _LEAST:.0f} to {100 * _MOST:.0f} %",
            "See whether others use the device (nvidia-smi) and whether its clocks are limited.",
            launched.end,
        )
    return Finding(told, "a device's peak and MFU" if bench.is_cpu else "")
