"""``determined.pytorch.deepspeed._trainer`` with dstrial's trainer."""

from __future__ import annotations

from dstrial import Trainer, init
from dstrial.trainer import seed_everything as _set_random_seeds

__all__ = ["Trainer", "_set_random_seeds", "init"]
