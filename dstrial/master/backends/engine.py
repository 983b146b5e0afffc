"""The interface to engines with a queue of their own: Slurm and Ray.

An engine chooses nodes after slots were requested. So each waiting trial becomes a *job* of the engine (a batch job, a placement
group). A running job's nodes become nodes of the master for that trial alone. A job outlives an allocation while its trial
wants to run again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from dstrial.errors import MasterError
from dstrial.hosts.transport import Transport
from dstrial.master.backends.backend import Refusal

JobState = Literal["pending", "running", "leaving", "ended"]
"""Of an engine's job: it waits; it has its nodes; it was asked to give them back soon; it has none any more."""


class EngineRefusedError(MasterError):
    """An engine rejects a job, or could never start it; the message says what to do."""


class EngineNotNowError(EngineRefusedError):
    """An engine rejects a job for now; the request is repeated.

    Too many jobs wait, or nodes that the job needs are down.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class JobRequest:
    """A request for nodes.

    Attributes:
        key: ``trial-7`` or ``command-<task id>``; another master finds the job by it.
        title: of the job in the engine's own lists.
        num_slots: on all nodes together, at least 1.
        is_on_one_node: whether the slots must be on one node.
        kept_off: names of excluded nodes.
        wants_devices: whether a slot is an accelerator; else a processor core.
        may_wait: whether the job is queued although its nodes are down or drained.
        settings: the user's ``slurm`` section of the experiment's config.
    """

    key: str
    title: str
    num_slots: int
    is_on_one_node: bool = False
    kept_off: frozenset[str] = frozenset()
    wants_devices: bool = False
    may_wait: bool = False
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A job's slots on one node."""

    host: str
    num_slots: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineJob:
    """A job as its engine sees it.

    Attributes:
        id: the engine's; one word for a shell.
        key: of its request.
        text: state for people, with the engine's reason: ``job 12: pending (Resources: …)``.
        parts: in rank order; empty unless it runs or leaves.
        is_beginning: whether it has nodes and cannot be used yet.
        has_rest: whether the engine keeps some of its nodes although it ended: cancel it.
    """

    id: str
    key: str
    state: JobState
    text: str
    parts: tuple[Part, ...] = ()
    is_beginning: bool = False
    has_rest: bool = False


class Engine(Protocol):
    """An engine with a queue; its methods raise ConnectionError if it does not answer.

    One thread, never the scheduler's, calls it and may wait some seconds; any thread may call ``why_never``.

    Attributes:
        name: as its users write it, ``Slurm``.
    """

    name: str

    def capacity(self) -> Mapping[str, int]:
        """Return all slots, used or not, of each node that is up, by node name."""
        ...

    def down(self) -> Mapping[str, int]:
        """Return slots of nodes that are down and may return, by the last ``capacity``."""
        ...

    def spare(self) -> Mapping[str, int]:
        """Return idle slots by node; none while other users wait for slots."""
        ...

    def called(self, job_id: str) -> str:
        """Return a job's name for people: ``job 12``."""
        ...

    def why_never(self, request: JobRequest) -> Sequence[Refusal]:
        """Return why such a job could never run; empty if it may.

        Raises:
            OSError: the engine does not answer, or does not know now.
        """
        ...

    def submit(self, request: JobRequest) -> str:
        """Request nodes; return the job's id.

        Raises:
            EngineRefusedError: it is rejected, or could never run.
            EngineNotNowError: it is rejected for now.
        """
        ...

    def most_pending(self, num_slots: int) -> int:
        """Return how many jobs, of at most ``num_slots``, may wait with the engine.

        The rest waits with the master, in its order.
        """
        ...

    def jobs(self) -> Sequence[EngineJob]:
        """Return jobs of this state directory's masters; ended ones may be missing."""
        ...

    def cancel(self, job_id: str) -> None:
        """Release a job's nodes or its place in the queue. Idempotent."""
        ...

    def transport(self, job_id: str) -> Transport:
        """Return how to start programs on a running job's nodes."""
        ...

    def close(self) -> None:
        """Disconnect; jobs stay."""
        ...
