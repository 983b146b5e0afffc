"""Choose the number of ranks to start here, and this machine's place in the job.

All commands import this module for ``--slots``, so heavy imports are inside functions.
"""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dstrial.errors import LaunchError

if TYPE_CHECKING:
    from determined import ClusterInfo

    from dstrial.launch.local_ranks import Placement

# Determined's master reserves the port in this variable for the allocation; its launcher defaults to 29400.
_CLUSTER_PORT_VARIABLE = "C10D_PORT"
_CLUSTER_PORT = 29400
_CLUSTER_VARIABLES = ("DET_ALLOCATION_ID", "DET_CLUSTER_ID", "DET_TRIAL_ID")
_DEVICE_FILES = ("nvidia*", "kfd", "dri/renderD*", "accel*", "davinci*", "hl[0-9]*", "xpu*", "neuron*", "dxg")


def slots_argument(text: str) -> int:
    """Parse ``--slots``; for ``type=`` of an ``argparse`` argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"the value is {text!r}; expected an integer of at least 1. Leave --slots out to take the config's."
        )
    return value


def is_on_cluster(environ: Mapping[str, str]) -> bool:
    """Return whether this may be a process of a cluster or an embedded master."""
    return any(name in environ for name in _CLUSTER_VARIABLES)


def num_accelerators() -> int:
    """Return the number of accelerators; 0 if DeepSpeed will train on the CPU.

    Imports torch if there may be an accelerator.
    """
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen == "cpu" or not (chosen or any(glob.glob(f"/dev/{name}") for name in _DEVICE_FILES)):  # noqa: PTH207  # pathlib is slower
        return 0
    from dstrial.ranks.process_group import has_accelerator, num_torch_accelerators

    return num_torch_accelerators() if has_accelerator() else 0


def num_slots(asked: int | None, configured: int | None) -> int:
    """Return the number of ranks to start off a cluster.

    ``asked``, else ``configured`` (0 means one rank on CPU), else one per accelerator, else 1. Each rank checks by itself that
    there are enough accelerators (``ranks.devices.device_index``).
    """
    if asked is not None and asked < 1:
        raise LaunchError(f"--slots is {asked}; expected at least 1. Leave it out to take the config's.")
    wanted = asked if asked is not None else configured
    return max(num_accelerators() if wanted is None else wanted, 1)


def cluster_info() -> ClusterInfo | None:
    """Return Determined's cluster info for this process's trial; None off a cluster."""
    if not is_on_cluster(os.environ):
        return None
    import determined

    info = determined.get_cluster_info()
    return info if info is not None and info.task_type == "TRIAL" else None


def cluster_placement(info: ClusterInfo) -> Placement:
    """Return this container's placement among the containers of its trial."""
    from dstrial.launch.local_ranks import Placement

    addresses = info.container_addrs
    ranks_by_node = tuple(max(count, 1) for count in info.container_slot_counts)
    if len(addresses) == 1:
        return Placement(ranks_by_node)
    port = int(os.environ.get(_CLUSTER_PORT_VARIABLE) or _CLUSTER_PORT)
    return Placement(ranks_by_node, info.container_rank, addresses[0], port)
