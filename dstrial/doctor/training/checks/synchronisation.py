"""Between two reports dstrial's loader, ``to_device`` and loop never wait on CUDA.

CUDA's own check (``torch.cuda.set_sync_debug_mode``) tells of each synchronisation with the line that causes it, over whole
batches with a pinned loader and four workers; those of DeepSpeed are listed, those of dstrial fail. Then the same
as errors, except inside of DeepSpeed's own calls. Only CUDA has that check.
"""

from __future__ import annotations

from dstrial.doctor.training.bench import Bench
from dstrial.doctor.training.check import CheckFailedError, Finding, NotApplicableError


def run(bench: Bench) -> Finding:
    """Train under the check."""
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
