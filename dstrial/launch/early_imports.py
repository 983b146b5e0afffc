"""Imports for the ranks while the launcher imports its own.

A rank that is a new process imports torch and DeepSpeed for seconds, after the launcher has done so, each rank by itself. Where
a launcher is no fork already, one process beside it imports them once for all ranks of a trial, and ends when these have begun.
In doubt ranks are new processes: where there may be an accelerator, on a cluster of Determined's, where it was turned off.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dstrial.fork_server import client
from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE, WARM_VARIABLE

logger = logging.getLogger("dstrial.launch")

READY_TIMEOUT_S = 60.0
"""After this long ranks are new processes."""
_IMPORTS = ("dstrial.launch.imported_ahead",)
_CLUSTER_VARIABLES = ("DET_ALLOCATION_ID", "DET_CLUSTER_ID", "DET_TRIAL_ID")
_DEVICE_FILES = ("nvidia*", "kfd", "dri/renderD*", "accel*", "davinci*", "hl[0-9]*", "xpu*", "neuron*", "dxg")


def is_on_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether this may be a process of a cluster or an embedded master."""
    return any(name in environ for name in _CLUSTER_VARIABLES)


@contextlib.contextmanager
def importing_for_ranks(environ: Mapping[str, str], num_ranks: int) -> Iterator[None]:
    """Have a process import what ranks do, which ``run_ranks`` within the block forks.

    ``environ`` is that of the ranks, but for what tells them their numbers.
    """
    server = _start(environ, num_ranks) if _is_possible(environ) else None
    client.of_this_process = server or client.of_this_process
    try:
        yield
    finally:
        if server is not None:
            client.of_this_process = None
            server.close()


def _is_possible(environ: Mapping[str, str]) -> bool:
    if client.of_this_process is not None or sys.platform != "linux" or environ.get(WARM_VARIABLE) == "0":
        return False
    if is_on_cluster(environ) and ALLOCATION_DIR_VARIABLE not in environ:
        return False
    chosen = environ.get("DS_ACCELERATOR")
    return chosen == "cpu" if chosen else not any(glob.glob(f"/dev/{name}") for name in _DEVICE_FILES)  # noqa: PTH207  # pathlib is slower


def _start(environ: Mapping[str, str], num_ranks: int) -> client.ForkServer | None:
    # As run_ranks has it.
    defaults = {"OMP_NUM_THREADS": "1"} if num_ranks > 1 else {}
    try:
        return client.ForkServer.start({**defaults, **environ}, _IMPORTS, log=Path(os.devnull))
    except OSError as error:
        logger.info("ranks start as new processes: %s", error)
        return None


def is_ready(connection: client.Connection) -> bool:
    if not isinstance(connection, client.ForkServer):
        return True
    try:
        return connection.is_ready(READY_TIMEOUT_S)
    except client.ForkRefusedError as reason:
        logger.info("ranks start as new processes: %s", reason)
        return False
