"""``determined.pytorch.deepspeed._deepspeed_context`` with dstrial's context."""

from __future__ import annotations

from dstrial import DeepSpeedTrialContext, overwrite_deepspeed_config

__all__ = ["DeepSpeedTrialContext", "overwrite_deepspeed_config"]
