"""The Python stacks of this rank, written when its launcher asks by a signal.

faulthandler writes them from the signal's handler in C, also while the rank is blocked in a collective and no Python runs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from typing import IO

STACKS_FILE_VARIABLE = "DSTRIAL_STACKS_FILE"
"""Environment variable that names the file to which this rank appends its stacks."""

# Free of other uses: SIGUSR1 and SIGUSR2 belong to users (Slurm sends them before a time limit), and a real-time signal nobody
# catches would end the process, so that it is sent only to who catches it.
STACKS_SIGNAL = int(getattr(signal, "SIGRTMIN", 34)) + 9

_kept: list[IO[bytes]] = []


def dump_stacks_on_signal() -> None:
    """Have stacks written on ``STACKS_SIGNAL`` from now on.

    Does nothing without a launcher of ours.
    """
    named = os.environ.get(STACKS_FILE_VARIABLE)
    if not named or not hasattr(faulthandler, "register"):
        return
    try:
        file = open(named, "ab", buffering=0)  # noqa: SIM115, PTH123 - stays open as long as the process lives
    except OSError:  # its launcher was killed and the directory is gone
        return
    _kept.append(file)
    # Without chain, the kernel restarts what it interrupts (SA_RESTART, CPython Modules/faulthandler.c).
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


def name_threads() -> None:
    """Tell the launcher which threads keep this process from ending."""
    # The dumps of Python 3.13 and before have no names.
    for thread in threading.enumerate():
        if _kept and not thread.daemon and thread is not threading.main_thread():
            _kept[-1].write(f"Thread 0x{thread.ident:016x} is named {thread.name}\n".encode())
