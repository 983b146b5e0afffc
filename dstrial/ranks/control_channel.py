"""The control channel, which exchanges small Python objects between ranks.

It replaces Determined's ``DistributedContext``, whose ZMQ sockets need two fixed ports per machine and have no timeout. The
control channel uses a separate gloo group; at the deadline, its error names the missing ranks. Values are pickled. A message
is unpickled only if its HMAC tag is valid. Only this job's ranks can create valid tags, except in jobs on several machines
without a shared secret.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from typing import Any

from determined import core

from dstrial.errors import RankError
from dstrial.ranks.channel import TIMEOUT_VARIABLE, GroupChannel, PendingGather
from dstrial.ranks.identity import RankIdentity
from dstrial.ranks.job_secret import SECRET_VARIABLE, key_from_environ

logger = logging.getLogger("dstrial.trainer")

DEFAULT_TIMEOUT_S = 1800.0

_channel_numbers = itertools.count()


def timeout_from_environ() -> float:
    """Return ``DSTRIAL_TIMEOUT_S``, the timeout of collective operations in seconds.

    The default is 1800.

    Raises:
        RankError: the variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return DEFAULT_TIMEOUT_S
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not timeout_s > 0:
        raise RankError(
            f"{TIMEOUT_VARIABLE} is {text!r}; expected seconds above 0. Set it to how long ranks may wait."
        )
    return timeout_s


class ControlChannel(core.DistributedContext):  # type: ignore[misc]  # determined ships no types
    """A ``DistributedContext`` over gloo, to pass to ``determined.core.init``.

    Every method is collective over all ranks (``_local`` methods: over a machine's ranks). The timeout of each call is
    ``timeout_s``, by default ``DSTRIAL_TIMEOUT_S`` or 1800 seconds. All ranks must call the methods in the same order, from one
    thread per rank. A single rank does not communicate.

    Raises:
        RankTimeoutError: a rank did not create its channel in time; the message names the missing ranks.

    Ranks: all, collectively, after ``init_process_group``.
    """

    def __init__(self, identity: RankIdentity, *, timeout_s: float | None = None) -> None:
        self.identity = identity
        self.timeout_s = timeout_from_environ() if timeout_s is None else timeout_s
        self._group_channel: GroupChannel | None = None
        self._local_group_channel: GroupChannel | None = None
        super().__init__(
            rank=identity.rank,
            size=identity.world_size,
            local_rank=identity.local_rank,
            local_size=identity.local_world_size,
            cross_rank=identity.node_rank,
            cross_size=identity.num_nodes,
            chief_ip=identity.master_addr,
        )

    def _init_ipc(self, force_tcp: bool) -> None:  # noqa: ARG002  # Determined's hook, called by its constructor
        if self.size < 2:
            return
        name = f"dstrial/control/{next(_channel_numbers)}"
        channel = GroupChannel(name, tuple(range(self.size)), self.rank, self.timeout_s)
        self._group_channel = channel
        identities = channel.allgather_identities(self.identity)
        try:
            self._agree_on_key(channel)
        except RankError:
            self.close()
            raise
        if self.local_size == self.size:
            self._local_group_channel = channel
            return
        node_rank = self.identity.node_rank
        members = tuple(i.rank for i in sorted(identities, key=_local_order) if i.node_rank == node_rank)
        if len(members) > 1:
            local = GroupChannel(f"{name}/node{node_rank}", members, self.rank, self.timeout_s)
            local.key = channel.key
            self._local_group_channel = local

    def _agree_on_key(self, channel: GroupChannel) -> None:
        """Set the same key for message tags on all ranks. Ranks: all, collectively."""
        key = key_from_environ(os.environ)
        if key is None and self.cross_size > 1:
            if self.rank == 0:
                logger.warning(
                    "no secret is known to all %d machines of this job: whoever can reach them on their network can pass "
                    "for a rank. Set %s to the same long random text on all of them.",
                    self.cross_size,
                    SECRET_VARIABLE,
                )
            key = b""
        with contextlib.ExitStack() as stack:
            channel.key = channel.agree_on_key(stack) if key is None else key
            channel.allgather(None, "start of the control channel")

    def allgather(self, stuff: Any) -> list[Any]:
        return _allgather(self._group_channel, stuff, "allgather")

    def begin_allgather(self, stuff: Any) -> PendingGather | None:
        """Start an ``allgather`` without blocking; ``wait`` returns the values.

        Returns None on a single rank. Before ``wait`` the group may begin other operations, in the same order on all ranks.
        Ranks: all, collectively.
        """
        if self._group_channel is None:
            return None
        return self._group_channel.begin_allgather(stuff, "allgather")

    def gather(self, stuff: Any) -> list[Any] | None:
        everything = _allgather(self._group_channel, stuff, "gather")
        return everything if self.rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        return _broadcast(self._group_channel, stuff, "broadcast")

    def allgather_local(self, stuff: Any) -> list[Any]:
        return _allgather(self._local_group_channel, stuff, "allgather_local")

    def gather_local(self, stuff: Any) -> list[Any] | None:
        everything = _allgather(self._local_group_channel, stuff, "gather_local")
        return everything if self.local_rank == 0 else None

    def broadcast_local(self, stuff: Any = None) -> Any:
        return _broadcast(self._local_group_channel, stuff, "broadcast_local")

    def leave(self, reason: str) -> None:
        """Leave the channel; ranks that wait for this rank fail within seconds.

        The error of those ranks contains ``reason``.
        """
        if self._group_channel is not None:
            self._group_channel.leave(reason)

    def close(self) -> None:
        for channel in {self._group_channel, self._local_group_channel}:
            if channel is not None:
                channel.close()
        self._group_channel = self._local_group_channel = None


def _allgather(channel: GroupChannel | None, value: Any, name: str) -> list[Any]:
    return [value] if channel is None else channel.allgather(value, name)


def _broadcast(channel: GroupChannel | None, value: Any, name: str) -> Any:
    return value if channel is None else channel.broadcast(value, name)


def _local_order(identity: RankIdentity) -> tuple[int, int]:
    return identity.node_rank, identity.local_rank
