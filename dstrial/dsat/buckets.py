"""What the gradient buckets of a ZeRO engine take. Pure."""

from __future__ import annotations

import dataclasses


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
