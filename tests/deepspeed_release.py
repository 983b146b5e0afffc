"""Whether DeepSpeed 0.19.0 is installed, the oldest supported release."""

from __future__ import annotations

import pytest

from dstrial.config.deepspeed_rules.settings import installed_deepspeed_version

IS_0_19_0 = installed_deepspeed_version() == "0.19.0"
needs_0_19_8 = pytest.mark.skipif(IS_0_19_0, reason="Requires: [deepspeed 0.19.8]")
"""Skips a test under DeepSpeed 0.19.0; a comment at the test states the reason."""
