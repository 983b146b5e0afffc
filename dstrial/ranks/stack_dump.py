"""Write this rank's Python stacks when the launcher sends a signal.

faulthandler writes the stacks in a C signal handler, even while the rank is blocked in a collective and runs no Python.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import IO

STACKS_FILE_VARIABLE = "DSTRIAL_STACKS_FILE"
"""Environment variable with the file to which this rank appends its stacks."""

# A real-time signal, because users need SIGUSR1 and SIGUSR2 (Slurm sends them before a time limit). The signal ends a process
# without a handler, so the launcher sends it only to processes that catch it.
STACKS_SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 9

_kept: list[IO[bytes]] = []


def dump_stacks_on_signal() -> None:
    """Append this rank's stacks to a file at each later ``STACKS_SIGNAL``.

    A no-op without dstrial's launcher, which names the file in ``STACKS_FILE_VARIABLE``.
    """
    named = os.environ.get(STACKS_FILE_VARIABLE)
    if not named or not hasattr(faulthandler, "register"):
        return
    try:
        file = open(named, "ab", buffering=0)  # noqa: SIM115, PTH123 - stays open as long as the process lives
    except OSError:  # the launcher was killed and its directory deleted
        return
    _kept.append(file)
    # Without chain, interrupted system calls are restarted (SA_RESTART, CPython Modules/faulthandler.c).
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
