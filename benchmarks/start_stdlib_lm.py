"""The example ``stdlib_lm`` as ``start.py`` starts it: each rank notes when its first batch begins."""

from __future__ import annotations

from typing import Any

import start_marks
from model_def import StdlibLmTrial


class StartStdlibLmTrial(StdlibLmTrial):
    """The example's trial."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        """Train as the example does."""
        start_marks.note_first_batch()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)
