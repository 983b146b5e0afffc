"""How a measuring trial that runs without a master is told its hyperparameters; dsat sets them, ranks read them."""

from __future__ import annotations

import json
import os
from typing import Any

HPARAMS_VARIABLE = "DSTRIAL_DSAT_HPARAMS"
"""Environment variable with all hyperparameters, as JSON."""


def measuring_hyperparameters() -> dict[str, Any] | None:
    """Return the hyperparameters of a measuring trial without a master; None in any other process.

    Ranks: any; no communication.
    """
    text = os.environ.get(HPARAMS_VARIABLE)
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
