"""Agreement of all ranks on what user code raises at a report or a validation.

The trained state is saved before the exception goes on. No rank ever waits in a collective for one that may not come: who has
failed looks in the store whether the others are at the same place, up to a deadline, and only then talks to them.
"""

from __future__ import annotations

import logging

from determined import core

from dstrial.errors import PeerFailedError
from dstrial.ranks.control_channel import ControlChannel

logger = logging.getLogger("dstrial.loop")

MEET_S = 30.0
"""How long a rank whose user code has raised waits for the others to have failed at the same place, seconds."""

EVALUATE_S = 300.0
"""The same for the others to end an evaluation in which no rank waits for another."""


def can_agree(distributed: core.DistributedContext) -> bool:
    """Say whether ranks can find out where the others are without waiting for ever."""
    return bool(distributed.size == 1) or isinstance(distributed, ControlChannel)


def arrive(distributed: core.DistributedContext, place: str) -> None:
    """Tell the others where this rank is. Ranks: each its own; at most 1 store write."""
    if isinstance(distributed, ControlChannel):
        distributed.arrive(place)


def all_arrived(distributed: core.DistributedContext, place: str, timeout_s: float) -> bool:
    """Wait for all ranks at a place; say whether they came. No collective operation."""
    if isinstance(distributed, ControlChannel):
        return distributed.all_arrived(place, timeout_s)
    return bool(distributed.size == 1)


def described(error: BaseException | None) -> str | None:
    """Return an error in one line for other ranks; None for none."""
    if error is None:
        return None
    return f"{type(error).__name__}: {error}".splitlines()[0]


def peer_failed(where: str, failures: list[tuple[int, str]]) -> PeerFailedError:
    """Return what the ranks raise whose own user code has not failed.

    Args:
        where: what failed.
        failures: rank and error of each that did.
    """
    rank, text = failures[0]
    # The launcher knows a consequence by the words about a peer (launch/failures.py).
    return PeerFailedError(
        f"{where} has failed on rank {rank} ({text}), and a peer of this rank exited for it; expected it to return on all "
        f"ranks. Look at the traceback of rank {rank}."
    )
