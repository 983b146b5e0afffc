"""The example ``hf_clm`` as ``start.py`` starts it: each rank notes when its first batch begins."""

from __future__ import annotations

from typing import Any

import start_marks
import train


class StartTrainer(train.Trainer):
    """Hugging Face's Trainer."""

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Train as the Trainer does."""
        start_marks.note_first_batch()
        return super().training_step(*arguments, **options)


if __name__ == "__main__":
    train.Trainer = StartTrainer
    train.main()
