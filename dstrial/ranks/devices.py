"""Choose the accelerator of a rank, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping

from dstrial.errors import RankError
from dstrial.ranks.identity import RankIdentity

SHARE_VARIABLE = "DSTRIAL_SHARE_DEVICE"
"""Environment variable: ``1`` allows several ranks on one accelerator, over gloo, for tests and small experiments."""


def may_share(environ: Mapping[str, str]) -> bool:
    """Return whether ``DSTRIAL_SHARE_DEVICE`` allows ranks to share an accelerator."""
    text = environ.get(SHARE_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise RankError(
            f"{SHARE_VARIABLE} is {text!r}; expected 0 or 1. Set it to 1 to let several ranks share a device."
        )
    return text == "1"


def is_shared(identity: RankIdentity, num_devices: int, *, may_share: bool) -> bool:
    """Return whether ranks share an accelerator; the result is equal on all ranks.

    ``num_devices`` is the number of this machine's accelerators. On several machines the result is ``may_share``, because a
    rank does not know the devices of other machines.
    """
    return (
        may_share
        and identity.world_size > 1
        and (identity.num_nodes > 1 or identity.local_world_size > num_devices)
    )


def device_index(identity: RankIdentity, num_devices: int, kind: str, *, may_share: bool) -> int:
    """Return the index of this rank's accelerator among the visible accelerators.

    Raises:
        RankError: the machine has more ranks than accelerators (of ``kind``), and ``may_share`` is false.
    """
    if num_devices and may_share:
        return identity.local_rank % num_devices
    # Some launchers make only one accelerator visible to each rank, with index 0.
    index = 0 if num_devices == 1 and identity.local_world_size > 1 else identity.local_rank
    if index >= num_devices:
        raise RankError(
            f"local rank is {identity.local_rank} on a machine with {num_devices} {kind} devices; "
            f"expected at most one rank per device. Start {num_devices} ranks here, set DS_ACCELERATOR=cpu, or set "
            f"{SHARE_VARIABLE}=1 to let ranks share a device."
        )
    return index
