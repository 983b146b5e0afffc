"""Tell an error that a rank caused from one that a dead peer caused in it."""

from __future__ import annotations

# What gloo, NCCL and the c10d store say in a rank whose peer went away. Compared in lower case.
# Source: torch 2.13 torch/csrc/distributed/c10d, ProcessGroupNCCL.cpp and NCCLUtils.cpp; NCCL's ncclRemoteError.
_PEER_LOSS_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "remote process exited or there was a network error",
    "a remote process exiting prematurely",
    # ProcessGroupNCCL's: the communicator was taken down, here or by its watchdog, because others did not come.
    "nccl communicator was aborted",
    "watchdog caught collective operation timeout",
    "some nccl operations have failed or timed out",
    "received a dump signal due to a collective timeout from",
    "a peer of this rank exited",
)


def is_watchdogs_end(signal_name: str | None, stderr_text: str) -> bool:
    """Say whether NCCL's watchdog ended a rank, because others came to no collective.

    It throws in a thread of C++, which ends the process by SIGABRT: there is no exception that Python could record.

    Args:
        signal_name: what ended the rank; None if nothing did.
        stderr_text: the end of what it has printed to standard error.

    Ranks: any; no communication.
    """
    return signal_name == "SIGABRT" and is_peer_loss(stderr_text)


def is_peer_loss(error_text: str) -> bool:
    """Say whether an error merely reports that another rank went away.

    Args:
        error_text: the exception's message, without its traceback (source lines could match by chance).

    Ranks: any; no communication.
    """
    lowered = error_text.lower()
    return any(phrase in lowered for phrase in _PEER_LOSS_PHRASES)
