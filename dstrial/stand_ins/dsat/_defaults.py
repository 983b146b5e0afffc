"""``determined.pytorch.dsat._defaults``: the constants as dstrial has them."""

from __future__ import annotations

from dstrial.dsat.compat import *  # noqa: F403 - all of them, by their names
