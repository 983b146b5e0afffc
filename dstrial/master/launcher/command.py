"""The command that an entrypoint stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TRIAL_FORM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def command_for(entrypoint: str | Sequence[str]) -> list[str]:
    """Return the command line of an entrypoint.

    A list is run as it is, a string by ``sh -c``, and ``module:Class`` by ``python3 -m dstrial.launch --trial``, which
    hands Determined's own trial classes to Determined's harness.
    """
    if not isinstance(entrypoint, str):
        return list(entrypoint)
    if _TRIAL_FORM.fullmatch(entrypoint.strip()):
        return ["python3", "-m", "dstrial.launch", "--trial", entrypoint.strip()]
    return ["sh", "-c", entrypoint]
