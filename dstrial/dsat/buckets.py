"""What other bucket sizes do to a dry run's bytes, without another dry run. Pure."""

from __future__ import annotations

import dataclasses

from dstrial.engine.dryrun.values import Line, MemoryForm, PhaseMemory


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """The gradient buckets of a ZeRO engine.

    Attributes:
        stage: ZeRO stage.
        reduce_elements: ``reduce_bucket_size``.
        bytes_per_element: of the type in which gradients are sent.
        is_overlapping: ``overlap_comm``.
    """

    stage: int
    reduce_elements: int
    bytes_per_element: int
    is_overlapping: bool = False

    @property
    def num_bytes(self) -> int:
        """All buckets, as DeepSpeed 0.19.8 allocates them: two with overlap in stages 1 and 2, one in stage 3.

        Source: DeepSpeed ``runtime/zero/stage_1_and_2.py`` ``setup_buckets`` and ``stage3.py``'s flat bucket.
        """
        if self.stage == 0:
            return 0
        count = 2 if self.is_overlapping and self.stage < 3 else 1
        return count * self.reduce_elements * self.bytes_per_element


def with_buckets(form: MemoryForm, old: Buckets, new: Buckets) -> MemoryForm:
    """Return the form of a configuration that differs in its buckets alone, without another dry run.

    Stages 1 and 2 hold them while gradients are made, stage 3 always. Growing buckets are added to every line of those
    phases, which is never too little: some of the lines are of times before DeepSpeed has allocated them.

    Args:
        form: of the configuration that was dry-run.
        old: its buckets.
        new: those of the other one; the same stage.
    """
    change = new.num_bytes - old.num_bytes
    touched = (
        {"backward", "reduce"} if new.stage in (1, 2) else {phase.phase for phase in form.phases} - {"init"}
    )
    phases = tuple(
        PhaseMemory(each.phase, tuple(Line(line.base + change, line.per_record) for line in each.lines))
        if each.phase in touched
        else each
        for each in form.phases
    )
    return MemoryForm(phases, form.settled + (change if new.stage == 3 else 0))
