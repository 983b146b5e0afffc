"""``determined.pytorch.dsat._defaults`` with dstrial's constants."""

from __future__ import annotations

from dstrial.dsat.compat import *  # noqa: F403 - all constants
