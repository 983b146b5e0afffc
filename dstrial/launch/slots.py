"""How many ranks to start here, and where this machine stands in the job.

Commands read ``--slots`` with it: what is heavy is imported where it is needed.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from dstrial.errors import LaunchError
from dstrial.ranks.devices import SHARE_VARIABLE, may_share

if TYPE_CHECKING:
    from determined import ClusterInfo

    from dstrial.launch.agent import Placement

# Determined's master reserves this variable's port for the allocation; its launcher defaults to 29400.
_CLUSTER_PORT_VARIABLE = "C10D_PORT"
_CLUSTER_PORT = 29400


def slots_argument(text: str) -> int:
    """Read ``--slots``, as ``type=`` of an ``argparse`` argument."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"the value is {text!r}; expected an integer of at least 1. Leave --slots out to take the config's."
        )
    return value


def num_accelerators() -> int:
    """Return how many accelerators there are, 0 if DeepSpeed will train on the CPU."""
    from dstrial.ranks.process_group import has_accelerator, num_torch_accelerators

    return num_torch_accelerators() if has_accelerator() else 0


def num_slots(asked: int | None, configured: int | None) -> int:
    """Return how many ranks to start off a cluster.

    As asked, else as configured (0 means one rank on CPU), else one per accelerator, else 1. Refuses fewer than 1, and more
    than the accelerators unless ``DSTRIAL_SHARE_DEVICE=1``.
    """
    if asked is not None and asked < 1:
        raise LaunchError(f"--slots is {asked}; expected at least 1. Leave it out to take the config's.")
    num_present = num_accelerators()
    wanted = asked if asked is not None else configured
    if wanted is None:
        return max(num_present, 1)
    if num_present and wanted > num_present and not may_share(os.environ):
        where = "--slots" if asked is not None else "resources.slots_per_trial"
        raise LaunchError(
            f"{where} is {wanted}; expected at most {num_present}, the accelerators of this machine. "
            f"Pass --slots {num_present}, set DS_ACCELERATOR=cpu to train on the CPU, or set {SHARE_VARIABLE}=1 to let "
            "ranks share a device."
        )
    return max(wanted, 1)


def cluster_info() -> ClusterInfo | None:
    """Return Determined's description of this process's trial, None off a cluster."""
    import determined

    info = determined.get_cluster_info()
    return info if info is not None and info.task_type == "TRIAL" else None


def cluster_placement(info: ClusterInfo) -> Placement:
    """Return where this container stands among those of its trial."""
    from dstrial.launch.agent import Placement

    addresses = info.container_addrs
    if len(addresses) == 1:
        return Placement()
    port = int(os.environ.get(_CLUSTER_PORT_VARIABLE) or _CLUSTER_PORT)
    return Placement(len(addresses), info.container_rank, addresses[0], port)
