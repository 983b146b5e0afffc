"""Exchange pickled objects between ranks over a gloo group, with deadlines."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import pickle
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from dstrial.errors import RankError, RankTimeoutError
from dstrial.ranks.identity import RankIdentity
from dstrial.ranks.job_secret import SECRET_VARIABLE, TAG_BYTES, is_same_tag, key_through_file, tag

TIMEOUT_VARIABLE = "DSTRIAL_TIMEOUT_S"

# The first collective transfers each message's length and first bytes. Only longer messages need a second collective.
_HEAD_BYTES = 1024
_LENGTH_BYTES = 8
_SHORT_BYTES = _HEAD_BYTES - _LENGTH_BYTES
_MAX_BYTES = 2**30  # limit of a message; the length is read before the tag is verified

_QUIET_WAIT_S = 5.0  # after this time a waiting rank writes a key to the store
_LEFT = "left"  # store key that a rank sets when it leaves the group
_START = "start of the control channel"


@dataclasses.dataclass(slots=True)
class _Transfer:
    """A started collective operation; its result is written to ``received``."""

    name: str
    number: int
    senders: tuple[int, ...]
    message: bytes
    work: Any = None
    received: memoryview = dataclasses.field(default_factory=lambda: memoryview(b""))


class PendingGather:
    """Handle of a started all-gather; ``wait`` returns the values."""

    def __init__(self, channel: GroupChannel, transfer: _Transfer) -> None:
        self._channel = channel
        self._transfer = transfer

    def wait(self) -> list[Any]:
        """Return the values of all ranks, by rank. Ranks: all, collectively.

        If a value is too long for one message, ``wait`` starts a second collective.
        """
        return [self._channel._decode(payload) for payload in self._channel._finish(self._transfer)]


class GroupChannel:
    """Collectives on pickled values over one gloo group.

    A message is an HMAC tag followed by a pickle. The tag covers the sender, the operation and the pickle. ``name`` must be
    unique in the job; ``ranks`` are the group's global ranks.

    Raises:
        RankTimeoutError: a rank missed the deadline; the message names the missing ranks.
        RankError: a peer has exited.

    Ranks: those in ``ranks``, collectively; also for all methods except ``leave`` and ``close``.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> None:
        self._name = name
        self._ranks = ranks
        self._rank = rank
        self._timeout_s = timeout_s
        self._quiet_s = min(_QUIET_WAIT_S, timeout_s / 3)
        self._num_operations = 0
        self._store = PrefixStore(name, _get_default_store())
        self.key: bytes | None = (
            None  # None until the ranks have exchanged a key; until then messages are JSON
        )
        # gloo's timeout is longer than timeout_s, whose error can name the missing ranks. gloo's timeout limits how long an
        # abandoned operation blocks the group's threads, and so the process's exit.
        timeout = datetime.timedelta(seconds=timeout_s + 3 * self._quiet_s)
        start = self._next(_START)
        self._announce(start)
        with self._start_errors(start):
            # Not `new_group`: if the default group is bound to a CUDA device, as DeepSpeed does for NCCL, `new_group` splits
            # NCCL's communicator on ranks that are not members, and these ranks wait for members that never call it (torch 2.13
            # distributed_c10d.py:2030-2058). `use_local_synchronization` avoids that, but names the group by the number of
            # groups of a rank (`_hash_ranks_to_str`), which differs between ranks of a pipeline.
            self._group: Any = dist.ProcessGroupGloo(  # torch's type stub lacks the inherited methods
                PrefixStore("gloo", self._store), ranks.index(rank), len(ranks), timeout=timeout
            )

    def allgather_identities(self, identity: RankIdentity) -> list[RankIdentity]:
        """Return the identities of all ranks, by rank.

        The identities are exchanged as JSON, which may be read before the ranks have a key for message tags.
        """
        payload = json.dumps(dataclasses.asdict(identity)).encode()
        messages = self._finish(self._begin(_START, payload, self._ranks))
        return [RankIdentity(**json.loads(bytes(message))) for message in messages]

    def agree_on_key(self, stack: contextlib.ExitStack) -> bytes:
        """Return a key for message tags that is the same on all ranks of the group.

        The first rank generates the key and passes it in a private file, which the exit of ``stack`` deletes.
        """
        block = key_through_file(PrefixStore("key", self._store), is_writer=self._rank == self._ranks[0])
        with self._start_errors(self._next(_START)):
            return stack.enter_context(block)

    def allgather(self, value: Any, name: str) -> list[Any]:
        return self.begin_allgather(value, name).wait()

    def begin_allgather(self, value: Any, name: str) -> PendingGather:
        """Start an all-gather without blocking; ``PendingGather.wait`` returns the values.

        ``name`` appears in errors. Before ``wait`` the group may begin other operations, in the same order on all ranks.
        """
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return PendingGather(self, self._begin(name, payload, self._ranks))

    def broadcast(self, value: Any, name: str) -> Any:
        root = self._ranks[0]
        is_root = self._rank == root
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL) if is_root else None
        (message,) = self._finish(self._begin(name, payload, (root,)))
        return value if is_root else self._decode(message)

    def leave(self, reason: str) -> None:
        """Leave the group; ranks that wait for this rank raise RankError with ``reason``."""
        self._store.set(_LEFT, f"rank {self._rank}: {reason}")

    def close(self) -> None:
        # The destructor ends gloo's threads; a remaining reference, for example in a traceback, delays that.
        del self._group

    # ---- messages --------------------------------------------------------------------------------------

    def _begin(self, name: str, payload: bytes | None, senders: tuple[int, ...]) -> _Transfer:
        transfer = self._next(name, senders)
        if payload is not None:
            transfer.message = self._tag(self._rank, transfer, payload) + payload
        message = transfer.message
        self._send(
            transfer, len(message).to_bytes(_LENGTH_BYTES, "little") + message[:_SHORT_BYTES], _HEAD_BYTES
        )
        return transfer

    def _finish(self, transfer: _Transfer) -> list[memoryview]:
        self._wait(transfer)
        heads = self._parts(transfer)
        lengths = [int.from_bytes(head[:_LENGTH_BYTES], "little") for head in heads]
        parts = [head[_LENGTH_BYTES:] for head in heads]
        longest, limit = max(lengths), _SHORT_BYTES if self.key is None else _MAX_BYTES
        if longest > limit:
            raise RankError(
                f"{transfer.name} announces {longest} bytes; expected at most {limit}. Pass smaller values; if none is that "
                "large, another program has connected to the ranks: start again."
            )
        if longest > _SHORT_BYTES:
            self._send(transfer, transfer.message, longest)
            self._wait(transfer)
            parts = self._parts(transfer)
        return [
            self._checked(part[:length], rank, transfer)
            for part, length, rank in zip(parts, lengths, transfer.senders, strict=True)
        ]

    def _send(self, transfer: _Transfer, content: bytes, size: int) -> None:
        sent = torch.zeros(size, dtype=torch.uint8)
        sent.numpy().data[: len(content)] = content
        if len(transfer.senders) == 1:
            transfer.work, arriving = self._group.broadcast([sent]), sent
        else:
            arriving = torch.empty(len(transfer.senders), size, dtype=torch.uint8)
            transfer.work = self._group.allgather([list(arriving.unbind())], [sent])
        transfer.received = arriving.numpy().reshape(-1).data

    @staticmethod
    def _parts(transfer: _Transfer) -> list[memoryview]:
        size = len(transfer.received) // len(transfer.senders)
        return [transfer.received[idx * size : (idx + 1) * size] for idx in range(len(transfer.senders))]

    def _tag(self, rank: int, transfer: _Transfer, payload: bytes | memoryview) -> bytes:
        if self.key is None:
            return bytes(TAG_BYTES)
        return tag(self.key, f"{self._name}/{transfer.number}/{rank}".encode(), payload)

    def _checked(self, message: memoryview, rank: int, transfer: _Transfer) -> memoryview:
        payload = message[TAG_BYTES:]
        if is_same_tag(message[:TAG_BYTES], self._tag(rank, transfer, payload)):
            return payload
        raise RankError(
            f"the message of rank {rank} in {_place(transfer)} does not carry this job's tag on rank {self._rank}; expected one "
            f"that a rank of this job has made, so nothing of it was read. Give all ranks the same {SECRET_VARIABLE}; if they "
            "have it, another program has connected to them."
        )

    def _decode(self, message: memoryview) -> Any:
        assert self.key is not None, "a pickle is read only after its tag"
        return pickle.loads(message)  # noqa: S301  # its tag is that of a rank of the same job

    # ---- waiting ---------------------------------------------------------------------------------------

    def _next(self, name: str, senders: tuple[int, ...] = ()) -> _Transfer:
        self._num_operations += 1
        return _Transfer(name, self._num_operations - 1, senders, b"")

    def _wait(self, transfer: _Transfer) -> None:
        quiet = datetime.timedelta(seconds=self._quiet_s)
        deadline_s = time.monotonic() + self._timeout_s
        has_announced = False
        while True:
            try:
                transfer.work.wait(quiet)
                return
            except RuntimeError as error:
                if transfer.work.is_completed() and "Operation timed out" not in str(error):
                    raise self._peer_error(transfer, error) from error
            # After this extra wait, every rank that arrived before the deadline has written its key.
            is_over = time.monotonic() >= deadline_s + self._quiet_s
            try:
                if not has_announced:
                    self._announce(transfer)
                    has_announced = True
                if self._store.check([_LEFT]):
                    left = self._store.get(_LEFT).decode(errors="replace")
                    raise RankError(f"{transfer.name} cannot complete without a rank that has left; {left}")
                failure = self._timeout_error(transfer) if is_over else None
            except RuntimeError as error:
                raise self._peer_error(transfer, error) from error
            if failure is not None:
                raise failure

    def _announce(self, transfer: _Transfer) -> None:
        self._store.set(f"{transfer.number}/{self._rank}", transfer.name)

    @contextlib.contextmanager
    def _start_errors(self, transfer: _Transfer) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                if self._missing(transfer):
                    raise self._timeout_error(transfer) from error
            raise self._peer_error(transfer, error) from error

    def _missing(self, transfer: _Transfer) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"{transfer.number}/{rank}"])]

    def _timeout_error(self, transfer: _Transfer) -> RankTimeoutError:
        missing = self._missing(transfer)
        if missing:
            names = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
            return RankTimeoutError(
                f"{_place(transfer)} is still without {names} after {self._timeout_s:g} s; expected all {len(self._ranks)} "
                f"ranks. Look at the output of {names}, which may be stuck or run other code than the rest, or set "
                f"{TIMEOUT_VARIABLE} to wait longer."
            )
        calls = {rank: self._store.get(f"{transfer.number}/{rank}") for rank in self._ranks}
        seen = ", ".join(f"rank {rank} in {name.decode(errors='replace')}" for rank, name in calls.items())
        return RankTimeoutError(
            f"{_place(transfer)} is not complete after {self._timeout_s:g} s, with {seen}; expected all ranks in the same call. "
            "Call it on all ranks, never inside a condition on the rank."
        )

    def _peer_error(self, transfer: _Transfer, error: Exception) -> RankError:
        return RankError(
            f"{transfer.name} is broken on rank {self._rank} because a peer of this rank exited ({error}); expected all "
            f"{len(self._ranks)} ranks to live. Look for the traceback of the rank that failed first."
        )


def _place(transfer: _Transfer) -> str:
    return f"{transfer.name} (operation {transfer.number} of the control channel)"
