"""How fast it trains: a device's FLOPs, synchronisations, the loop's own time."""

from __future__ import annotations

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError

_LEAST_MFU, _MOST_MFU = 0.10, 0.70


def check_flops(bench: Bench) -> Finding:
    """This device's peak of matrix products, and a small GPT's share of it (MFU).

    The GPT's FLOPs are counted by torch's counter, forward and backward, without recomputation. On an accelerator it has some
    200 million parameters in bf16 and is expected at 10 to 70 % of the measured peak; on the CPU it is tiny, and the figures
    say nothing of a device.
    """
    launched = bench.launch("flops", "--size", "small" if bench.is_cpu else "large")
    found = launched.facts
    mfu = float(found["mfu"])
    told = (
        f"peak {found['peak_tflops']:.3g} TFLOP/s in {found['dtype']}; GPT of {found['parameters'] / 1e6:.0f} M parameters: "
        f"{found['step_ms']:.1f} ms a step, {found['model_tflops']:.3g} TFLOP/s, MFU {100 * mfu:.0f} %"
    )
    if not bench.is_cpu and not _LEAST_MFU <= mfu <= _MOST_MFU:
        raise CheckFailedError(
            f"{told}; expected {100 * _LEAST_MFU:.0f} to {100 * _MOST_MFU:.0f} %",
            "See whether others use the device (nvidia-smi) and whether its clocks are limited.",
            launched.end,
        )
    return Finding(told, "a device's peak and MFU" if bench.is_cpu else "")


def check_synchronisation(bench: Bench) -> Finding:
    """Between reports dstrial's loader, ``to_device`` and loop do not wait for CUDA.

    CUDA's own check (``torch.cuda.set_sync_debug_mode``) tells of each synchronisation with the line that causes it, over
    whole batches with a pinned loader and four workers; those of DeepSpeed are listed, those of dstrial fail. Then the same
    as errors, except inside of DeepSpeed's own calls. Only CUDA has that check.
    """
    if not bench.has_cuda:
        raise NotApplicableError("there is no CUDA device, and nothing else tells of synchronisations")
    launched = bench.launch("synchronisation", may_fail=True)
    ours = list(launched.facts.get("of_dstrial") or [])
    if ours:
        raise CheckFailedError(
            f"{len(ours)} places of dstrial wait for the device: {', '.join(map(str, ours[:3]))}",
            "Report these places.",
            launched.end,
        )
    if launched.exit_code != 0:
        raise CheckFailedError(
            f"training ended with exit code {launched.exit_code}, at {launched.facts.get('doing') or 'its end'}",
            "Read the traceback, below: it names the call that waits for the device.",
            launched.end,
        )
    theirs = list(launched.facts.get("of_others") or [])
    return Finding(
        f"none of dstrial's in {launched.facts['checked_batches']} batches; {len(theirs)} places of DeepSpeed and torch"
    )


def check_loop_overhead(bench: Bench) -> Finding:
    """What dstrial's loop adds to each step, compared to DeepSpeed's on one engine.

    The time between two steps, without the steps themselves, in turns of both loops; the same method as ``make bench``,
    shorter. On the CPU figures of a busy machine say little.
    """
    found = bench.launch("overhead").facts
    return Finding(
        f"a step takes {found['step_us']:.0f} us; between two steps dstrial's loop takes {found['dstrial_us']:.0f} us and "
        f"a bare one {found['bare_us']:.0f} us: {found['added_percent']:.1f} % of a step",
        "the ratio to a device's steps" if bench.is_cpu else "",
    )
