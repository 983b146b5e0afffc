"""The control channel: small Python objects between ranks, on a process group of their own.

It stands in for Determined's ``DistributedContext``, whose ZMQ sockets take two fixed ports per machine
and wait for ever. This one runs over a gloo group beside the training's own group, so that it works
next to any accelerator's backend, needs no port, and gives up at a deadline with the names of the
ranks that did not come.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import os
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from determined import core
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dstrial.errors import RankError, RankIdentityError, RankTimeoutError
from dstrial.ranks.identity import RankIdentity

TIMEOUT_VARIABLE = "DSTRIAL_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 1800.0

# One collective carries a message of up to this size; a longer one takes a second collective.
_SHORT_MESSAGE_BYTES = 1024
_LENGTH_BYTES = 8
_SHORT_PAYLOAD_BYTES = _SHORT_MESSAGE_BYTES - _LENGTH_BYTES

# A rank that has waited this long says in the store that it is waiting; before, nothing is stored.
_QUIET_WAIT_S = 5.0

# Key in a lane's store under which a rank says that it takes part no more.
_LEFT = "left"

_channel_numbers = itertools.count()


def timeout_from_environ(default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Return how long ranks wait for each other: ``DSTRIAL_TIMEOUT_S``, seconds, or the default.

    Raises:
        RankError: the variable is no positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE)
    if not text:
        return default_s
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
    """A ``determined.core.DistributedContext`` over gloo, to pass to ``determined.core.init``.

    Every method is collective over all ranks (the ``_local`` ones over the ranks of a machine), has a
    deadline, and must be called by the same thread in the same order everywhere. On one rank nothing
    is communicated and no group exists.

    Args:
        identity: who this process is.
        timeout_s: deadline of each operation, seconds; None takes ``DSTRIAL_TIMEOUT_S``, else 1800.

    Raises:
        RankTimeoutError: not all ranks created their channel in time; names the missing ones.
        RankIdentityError: the ranks' identities do not fit together.

    Ranks: all, collectively, after ``init_process_group``.
    """

    def __init__(self, identity: RankIdentity, *, timeout_s: float | None = None) -> None:
        self.identity = identity
        self.timeout_s = timeout_from_environ() if timeout_s is None else timeout_s
        self._lane: _Lane | None = None
        self._local_lane: _Lane | None = None
        self._is_closed = False
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
        self._lane = _Lane(name, tuple(range(self.size)), self.rank, self.timeout_s)
        identities: list[RankIdentity] = self._lane.allgather(self.identity, "start of the control channel")
        try:
            _check_consistent(identities)
        except RankIdentityError:
            self.close()
            raise
        if self.local_size == self.size:
            self._local_lane = self._lane
            return
        node_rank = self.identity.node_rank
        members = tuple(i.rank for i in sorted(identities, key=_local_order) if i.node_rank == node_rank)
        if len(members) > 1:
            self._local_lane = _Lane(f"{name}/node{node_rank}", members, self.rank, self.timeout_s)

    def allgather(self, stuff: Any) -> list[Any]:
        """Return what every rank passed, ordered by rank. Ranks: all, collectively."""
        return [stuff] if self._lane is None else self._lane.allgather(stuff, "allgather")

    def gather(self, stuff: Any) -> list[Any] | None:
        """Return what every rank passed on the chief, None elsewhere. Ranks: all, collectively."""
        if self._lane is None:
            return [stuff]
        everything = self._lane.allgather(stuff, "gather")
        return everything if self.rank == 0 else None

    def broadcast(self, stuff: Any) -> Any:
        """Return what the chief passed. Ranks: all, collectively."""
        return stuff if self._lane is None else self._lane.broadcast(stuff, "broadcast")

    def allgather_local(self, stuff: Any) -> list[Any]:
        """Return what every rank of this machine passed, by local rank. Ranks: a machine's, collectively."""
        return [stuff] if self._local_lane is None else self._local_lane.allgather(stuff, "allgather_local")

    def gather_local(self, stuff: Any) -> list[Any] | None:
        """Return a machine's values on its first rank, else None. Ranks: a machine's, collectively."""
        if self._local_lane is None:
            return [stuff]
        everything = self._local_lane.allgather(stuff, "gather_local")
        return everything if self.local_rank == 0 else None

    def broadcast_local(self, stuff: Any = None) -> Any:
        """Return what the first rank of this machine passed. Ranks: a machine's, collectively."""
        return stuff if self._local_lane is None else self._local_lane.broadcast(stuff, "broadcast_local")

    def leave(self, reason: str) -> None:
        """Take part no more: ranks that wait for this one fail with ``reason`` within seconds.

        The channel is of no use to anybody afterwards.

        Args:
            reason: what happened here, for the error of the others.

        Ranks: each its own; no communication.
        """
        if self._lane is not None:
            self._lane.leave(reason)

    def close(self) -> None:
        """Give up the channel's groups; safe to call again. Ranks: each its own; no communication."""
        if self._is_closed:
            return
        self._is_closed = True
        lanes = {id(lane): lane for lane in (self._lane, self._local_lane) if lane is not None}
        self._lane = self._local_lane = None
        for lane in lanes.values():
            lane.close()


def _local_order(identity: RankIdentity) -> tuple[int, int]:
    return identity.node_rank, identity.local_rank


def _check_consistent(identities: list[RankIdentity]) -> None:
    """Compare what the ranks believe about the machines they are on."""
    facts = [(i.world_size, i.num_nodes) for i in identities]
    places = sorted(map(_local_order, identities))
    sizes = {i.node_rank: i.local_world_size for i in identities}
    expected = [(node, local) for node in sorted(sizes) for local in range(sizes[node])]
    if len(set(facts)) == 1 and places == expected and len(sizes) == identities[0].num_nodes:
        return
    seen = "; ".join(
        f"rank {i.rank} of {i.world_size}: local rank {i.local_rank} of {i.local_world_size} "
        f"on machine {i.node_rank} of {i.num_nodes}"
        for i in identities
    )
    raise RankIdentityError(
        f"the ranks' places are {seen}; expected every place once, and the same machines for all ranks. "
        "Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK and GROUP_WORLD_SIZE for each rank, "
        "or place equally many ranks, in order, on every machine."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Operation:
    """One collective call, as told in errors and in the store."""

    name: str
    number: int


class _Lane:
    """Pickled objects over one gloo group, each operation with a deadline."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> None:
        self._ranks = ranks
        self._rank = rank
        self._timeout_s = timeout_s
        self._quiet_s = min(_QUIET_WAIT_S, timeout_s / 3)
        self._numbers = itertools.count()
        self._store = PrefixStore(name, _get_default_store())
        # gloo's own deadline must lie behind ours, which knows who is missing; it bounds how long
        # the abandoned operation keeps the group's threads (and so the process's exit) waiting.
        own_deadline = datetime.timedelta(seconds=timeout_s + 3 * self._quiet_s)
        start = _Operation("start of the control channel", next(self._numbers))
        self._say_waiting(start)
        try:
            # Not `new_group`: beside a default group that is bound to a CUDA device, as DeepSpeed binds NCCL's, ranks that
            # are no members split NCCL's communicator there, and wait in it for members that never come (torch 2.13
            # distributed_c10d.py:2030-2058). `use_local_synchronization` avoids that, but names the group after the number
            # of groups that a rank is in (`_hash_ranks_to_str`), which differs between ranks of a pipeline.
            self._group: Any = dist.ProcessGroupGloo(  # torch's stub lacks what it inherits
                PrefixStore("gloo", self._store), ranks.index(rank), len(ranks), timeout=own_deadline
            )
        except RuntimeError as error:
            raise self._start_error(start, error) from error
        self._send = torch.zeros(_SHORT_MESSAGE_BYTES, dtype=torch.uint8)
        self._send_view = self._send.numpy().data
        self._receive = [torch.zeros(_SHORT_MESSAGE_BYTES, dtype=torch.uint8) for _ in ranks]
        self._receive_views = [tensor.numpy().data for tensor in self._receive]

    def allgather(self, value: Any, name: str) -> list[Any]:
        operation = _Operation(name, next(self._numbers))
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        _write(self._send_view, payload)
        self._wait(self._group.allgather([self._receive], [self._send]), operation)
        lengths = [_length(view) for view in self._receive_views]
        longest_bytes = max(lengths)
        views = [view[_LENGTH_BYTES:] for view in self._receive_views]
        if longest_bytes > _SHORT_PAYLOAD_BYTES:
            send = torch.zeros(longest_bytes, dtype=torch.uint8)
            send.numpy().data[: len(payload)] = payload
            receive = [torch.empty(longest_bytes, dtype=torch.uint8) for _ in self._ranks]
            self._wait(self._group.allgather([receive], [send]), operation)
            views = [tensor.numpy().data for tensor in receive]
        return [_unpickle(view[:length]) for view, length in zip(views, lengths, strict=True)]

    def broadcast(self, value: Any, name: str) -> Any:
        operation = _Operation(name, next(self._numbers))
        is_source = self._rank == self._ranks[0]
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if is_source else b""
        if is_source:
            _write(self._send_view, payload)
        self._wait(self._group.broadcast([self._send]), operation)
        length = _length(self._send_view)
        view = self._send_view[_LENGTH_BYTES:]
        if length > _SHORT_PAYLOAD_BYTES:
            long_message = torch.zeros(length, dtype=torch.uint8)
            view = long_message.numpy().data
            if is_source:
                view[:length] = payload
            self._wait(self._group.broadcast([long_message]), operation)
        return value if is_source else _unpickle(view[:length])

    def leave(self, reason: str) -> None:
        self._store.set(_LEFT, f"rank {self._rank}: {reason}")

    def _require_all(self, operation: _Operation) -> None:
        if self._store.check([_LEFT]):
            raise RankError(
                f"{operation.name} is without a rank that takes part no more; {self._store.get(_LEFT).decode()}"
            )

    def close(self) -> None:
        # Its destructor ends gloo's threads. Any reference that is left, such as a traceback's, puts that off.
        del self._group

    def _wait(self, work: dist.Work, operation: _Operation) -> None:
        quiet = datetime.timedelta(seconds=self._quiet_s)
        give_up_at_s = time.monotonic() + self._timeout_s
        has_said = False
        while True:
            try:
                work.wait(quiet)
                return
            except RuntimeError as error:
                if work.is_completed() and "Operation timed out" not in str(error):
                    raise self._peer_error(operation, error) from error
            # Past the deadline by one quiet wait, whoever arrived before the deadline has said so.
            is_over = time.monotonic() >= give_up_at_s + self._quiet_s
            try:
                if not has_said:
                    self._say_waiting(operation)
                    has_said = True
                self._require_all(operation)
                failure = self._timeout_error(operation) if is_over else None
            except RuntimeError as error:
                raise self._peer_error(operation, error) from error
            if failure is not None:
                raise failure

    def _start_error(self, operation: _Operation, error: Exception) -> RankError:
        try:
            is_incomplete = bool(self._missing(operation))
        except RuntimeError:
            is_incomplete = False
        return self._timeout_error(operation) if is_incomplete else self._peer_error(operation, error)

    def _say_waiting(self, operation: _Operation) -> None:
        self._store.set(f"{operation.number}/{self._rank}", operation.name)

    def _missing(self, operation: _Operation) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"{operation.number}/{rank}"])]

    def _timeout_error(self, operation: _Operation) -> RankTimeoutError:
        where = f"{operation.name} (operation {operation.number} of the control channel)"
        missing = self._missing(operation)
        if missing:
            names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
            return RankTimeoutError(
                f"{where} is still without {names} after {self._timeout_s:g} s; expected all "
                f"{len(self._ranks)} ranks. Look at the output of {names}, which may be stuck or have taken "
                f"another path than the rest, or set {TIMEOUT_VARIABLE} to wait longer."
            )
        names_by_rank = {r: self._store.get(f"{operation.number}/{r}").decode() for r in self._ranks}
        seen = ", ".join(f"rank {rank} in {name}" for rank, name in names_by_rank.items())
        return RankTimeoutError(
            f"{where} is not complete after {self._timeout_s:g} s, with {seen}; expected all ranks in the "
            "same call. Call it on all ranks, never inside a condition on the rank."
        )

    def _peer_error(self, operation: _Operation, error: Exception) -> RankError:
        return RankError(
            f"{operation.name} is broken on rank {self._rank} because a peer of this rank exited ({error}); "
            f"expected all {len(self._ranks)} ranks to live. "
            "Look for the traceback of the rank that failed first."
        )


def _write(view: memoryview, payload: bytes) -> None:
    view[:_LENGTH_BYTES] = len(payload).to_bytes(_LENGTH_BYTES, "little")
    if len(payload) <= _SHORT_PAYLOAD_BYTES:
        view[_LENGTH_BYTES : _LENGTH_BYTES + len(payload)] = payload


def _length(view: memoryview) -> int:
    return int.from_bytes(view[:_LENGTH_BYTES], "little")


def _unpickle(view: memoryview) -> Any:
    return pickle.loads(view)  # noqa: S301  # comes from a rank of the same job
