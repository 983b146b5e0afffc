"""One lane of the control channel: tagged messages over a gloo group of its own.

Each operation has a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dstrial.errors import RankError, RankTimeoutError
from dstrial.ranks.identity import RankIdentity
from dstrial.ranks.job_secret import SECRET_VARIABLE, TAG_BYTES, is_same_tag, key_through_file, tag

TIMEOUT_VARIABLE = "DSTRIAL_TIMEOUT_S"

# One collective carries a message of up to this size; a longer one takes a second collective.
_SHORT_PAYLOAD_BYTES = 1016
_LENGTH_BYTES = 8
_HEAD_BYTES = _LENGTH_BYTES + TAG_BYTES
_SHORT_MESSAGE_BYTES = _HEAD_BYTES + _SHORT_PAYLOAD_BYTES

# A rank that has waited this long says in the store that it is waiting; before, nothing is stored.
_QUIET_WAIT_S = 5.0

# Key in a lane's store under which a rank says that it takes part no more.
_LEFT = "left"


@dataclasses.dataclass(frozen=True, slots=True)
class _Operation:
    """One collective call, as told in errors and in the store."""

    name: str
    number: int


class _Buffers:
    """Short messages of a collective under way: this rank's, all ranks'."""

    def __init__(self, num_ranks: int) -> None:
        self.send = torch.zeros(_SHORT_MESSAGE_BYTES, dtype=torch.uint8)
        self.send_view = self.send.numpy().data
        self.receive = [torch.zeros(_SHORT_MESSAGE_BYTES, dtype=torch.uint8) for _ in range(num_ranks)]
        self.receive_views = [tensor.numpy().data for tensor in self.receive]


@dataclasses.dataclass(slots=True)
class _Underway:
    """An all-gather that has begun."""

    operation: _Operation
    payload: bytes
    buffers: _Buffers
    work: dist.Work


class PendingGather:
    """The result of ``begin_allgather``. Ranks: those of the lane, all."""

    def __init__(self, lane: GroupChannel, underway: _Underway) -> None:
        self._lane = lane
        self._underway = underway

    @property
    def is_complete(self) -> bool:
        """Whether ``wait`` would return without waiting. Ranks: each its own.

        A value that is too long for one message never is: its second part begins in ``wait``.
        """
        underway = self._underway
        if len(underway.payload) > _SHORT_PAYLOAD_BYTES or not underway.work.is_completed():
            return False
        heads = (int.from_bytes(view[:_LENGTH_BYTES], "little") for view in underway.buffers.receive_views)
        return all(length <= _SHORT_PAYLOAD_BYTES for length in heads)

    def wait(self) -> list[Any]:
        """Return what every rank passed, in their order. Ranks: all, at the same place.

        A value that is too long for one message takes a second collective here.
        """
        lane = self._lane
        values = [lane._unpickle(message) for message in lane._finish(self._underway)]
        lane._pending_buffers = self._underway.buffers
        return values


class GroupChannel:
    """Pickled objects over one gloo group, each operation with a deadline.

    A message is its length, an HMAC tag over sender, operation and content, and the pickle. ``name`` is used once in a job.

    Raises:
        RankTimeoutError: not all ranks came in time; names the missing ones.
        RankError: a peer has gone.

    Ranks: those of ``ranks``, collectively, as are all methods but ``leave`` and ``close``.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> None:
        self._ranks = ranks
        self._rank = rank
        self._timeout_s = timeout_s
        self._quiet_s = min(_QUIET_WAIT_S, timeout_s / 3)
        self._num_operations = 0
        self._name = name
        self._store = PrefixStore(name, _get_default_store())
        # None before the ranks have agreed on one: what is said then is JSON.
        self.key: bytes | None = None
        # gloo's own deadline must lie behind ours, which knows who is missing; it bounds how long
        # the abandoned operation keeps the group's threads (and so the process's exit) waiting.
        own_deadline = datetime.timedelta(seconds=timeout_s + 3 * self._quiet_s)
        start = _Operation("start of the control channel", self._next_number())
        self._log_waiting(start)
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
        self._buffers = _Buffers(len(ranks))
        self._pending_buffers: _Buffers | None = None

    def allgather_identities(self, identity: RankIdentity) -> list[RankIdentity]:
        """Return what every rank says of itself, before there is a key."""
        operation = _Operation("start of the control channel", self._next_number())
        payload = json.dumps(dataclasses.asdict(identity)).encode()
        told = [json.loads(bytes(message)) for message in self._exchange(payload, operation)]
        return [RankIdentity(**fields) for fields in told]

    def agree_on_key(self, stack: contextlib.ExitStack) -> bytes:
        """Return the first rank's key; ``stack`` keeps its file until all have read it."""
        operation = _Operation("start of the control channel", self._next_number())
        block = key_through_file(PrefixStore("key", self._store), is_writer=self._rank == self._ranks[0])
        try:
            return stack.enter_context(block)
        except RuntimeError as error:
            raise self._start_error(operation, error) from error

    def allgather(self, value: Any, name: str) -> list[Any]:
        operation = _Operation(name, self._next_number())
        messages = self._exchange(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), operation)
        return [self._unpickle(message) for message in messages]

    def begin_allgather(self, value: Any, name: str) -> PendingGather:
        """Begin an ``allgather`` that waits for nobody. One at a time.

        Other operations may come before its ``wait``, on all ranks the same.
        """
        operation = _Operation(name, self._next_number())
        buffers, self._pending_buffers = self._pending_buffers or _Buffers(len(self._ranks)), None
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return PendingGather(self, self._begin(payload, operation, buffers))

    def broadcast(self, value: Any, name: str) -> Any:
        operation = _Operation(name, self._next_number())
        source = self._ranks[0]
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if self._rank == source else b""
        send, send_view = self._buffers.send, self._buffers.send_view
        if self._rank == source:
            self._write(send_view, payload, operation)
        self._wait(self._group.broadcast([send]), operation)
        if self._rank == source:
            if len(payload) > _SHORT_PAYLOAD_BYTES:
                self._wait(self._group.broadcast([self._long(len(payload), payload, operation)]), operation)
            return value
        length, message = self._read(send_view, source, operation)
        if message is None:
            long_message = self._long(length)
            self._wait(self._group.broadcast([long_message]), operation)
            message = self._read_long(long_message.numpy().data, length, source, operation)
        return self._unpickle(message)

    def _exchange(self, payload: bytes, operation: _Operation) -> list[memoryview]:
        """Return every rank's payload, each known to be its own."""
        return self._finish(self._begin(payload, operation, self._buffers))

    def _begin(self, payload: bytes, operation: _Operation, buffers: _Buffers) -> _Underway:
        self._write(buffers.send_view, payload, operation)
        work = self._group.allgather([buffers.receive], [buffers.send])
        return _Underway(operation, payload, buffers, work)

    def _finish(self, underway: _Underway) -> list[memoryview]:
        payload, operation, buffers = underway.payload, underway.operation, underway.buffers
        self._wait(underway.work, operation)
        heads = [
            self._read(view, rank, operation)
            for rank, view in zip(self._ranks, buffers.receive_views, strict=True)
        ]
        longest_bytes = max(length for length, _ in heads)
        if self.key is None and longest_bytes > _SHORT_PAYLOAD_BYTES:
            raise RankError(
                f"{operation.name} announces {longest_bytes} bytes before the ranks know each other; expected at most "
                f"{_SHORT_PAYLOAD_BYTES}. Another program has got into a connection of theirs: start again."
            )
        if longest_bytes <= _SHORT_PAYLOAD_BYTES:
            return [message for _, message in heads if message is not None]
        receive = [self._long(longest_bytes) for _ in self._ranks]
        send = self._long(longest_bytes, payload, operation)
        self._wait(self._group.allgather([receive], [send]), operation)
        return [
            self._read_long(tensor.numpy().data, length, rank, operation) if message is None else message
            for rank, tensor, (length, message) in zip(self._ranks, receive, heads, strict=True)
        ]

    def _write(self, view: memoryview, payload: bytes, operation: _Operation) -> None:
        """Write a short message, or the announcement of a long one."""
        length = len(payload).to_bytes(_LENGTH_BYTES, "little")
        short = payload if len(payload) <= _SHORT_PAYLOAD_BYTES else b""
        view[:_LENGTH_BYTES] = length
        view[_LENGTH_BYTES:_HEAD_BYTES] = self._tag(self._rank, operation, length, short)
        view[_HEAD_BYTES : _HEAD_BYTES + len(short)] = short

    def _read(self, view: memoryview, rank: int, operation: _Operation) -> tuple[int, memoryview | None]:
        """Return a message's length and the message, None if that is long and comes later."""
        length_view = view[:_LENGTH_BYTES]
        length = int.from_bytes(length_view, "little")
        is_short = length <= _SHORT_PAYLOAD_BYTES
        payload = view[_HEAD_BYTES : _HEAD_BYTES + (length if is_short else 0)]
        self._require_tag(view[_LENGTH_BYTES:_HEAD_BYTES], rank, operation, length_view, payload)
        return length, payload if is_short else None

    def _long(self, length: int, payload: bytes = b"", operation: _Operation | None = None) -> torch.Tensor:
        tensor = torch.zeros(TAG_BYTES + length, dtype=torch.uint8)
        if operation is not None:
            view = tensor.numpy().data
            view[:TAG_BYTES] = self._tag(self._rank, operation, b"long", payload)
            view[TAG_BYTES : TAG_BYTES + len(payload)] = payload
        return tensor

    def _read_long(self, view: memoryview, length: int, rank: int, operation: _Operation) -> memoryview:
        payload = view[TAG_BYTES : TAG_BYTES + length]
        self._require_tag(view[:TAG_BYTES], rank, operation, b"long", payload)
        return payload

    def _tag(self, rank: int, operation: _Operation, *parts: bytes | memoryview) -> bytes:
        if self.key is None:
            return bytes(TAG_BYTES)
        place = f"{self._name}/{operation.number}/{rank}".encode()
        return tag(self.key, place, *parts)

    def _require_tag(
        self, given: memoryview, rank: int, operation: _Operation, *parts: bytes | memoryview
    ) -> None:
        if is_same_tag(given, self._tag(rank, operation, *parts)):
            return
        raise RankError(
            f"the message of rank {rank} in {operation.name} (operation {operation.number} of the control channel) does not "
            f"carry this job's tag on rank {self._rank}; expected one that a rank of this job has made, so nothing of it was "
            f"read. Give all ranks the same {SECRET_VARIABLE}; if they have it, another program has got into a connection "
            "of theirs."
        )

    def _unpickle(self, message: memoryview) -> Any:
        assert self.key is not None, "a pickle is read only after its tag"
        return pickle.loads(message)  # noqa: S301  # its tag is that of a rank of the same job

    def _next_number(self) -> int:
        self._num_operations += 1
        return self._num_operations - 1

    def leave(self, reason: str) -> None:
        """Leave the group; ranks that wait for this one fail with the reason."""
        self._store.set(_LEFT, f"rank {self._rank}: {reason}")

    def _require_all(self, operation: _Operation) -> None:
        if self._store.check([_LEFT]):
            raise RankError(
                f"{operation.name} is without a rank that takes part no more; {self._store.get(_LEFT).decode(errors='replace')}"
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
            # One quiet wait after the deadline, every rank that arrived in time has said so.
            is_over = time.monotonic() >= give_up_at_s + self._quiet_s
            try:
                if not has_said:
                    self._log_waiting(operation)
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

    def _log_waiting(self, operation: _Operation) -> None:
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
        names_by_rank = {
            r: self._store.get(f"{operation.number}/{r}").decode(errors="replace") for r in self._ranks
        }
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
