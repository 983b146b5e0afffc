"""Tell an error that a rank caused from one that a dead peer caused in it."""

from __future__ import annotations

# What gloo, NCCL and the c10d store say in a rank whose peer went away. Compared in lower case.
_PEER_LOSS_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "remote process exited or there was a network error",
    "a peer of this rank exited",
)


def is_peer_loss(error_text: str) -> bool:
    """Say whether an error merely reports that another rank went away.

    Args:
        error_text: the exception's message, without its traceback (source lines could match by chance).

    Ranks: any; no communication.
    """
    lowered = error_text.lower()
    return any(phrase in lowered for phrase in _PEER_LOSS_PHRASES)
