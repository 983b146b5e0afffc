"""The interface to engines with a queue of their own: Slurm and Ray.

An engine chooses nodes after slots were requested. So each allocation is a *job* of the engine (a batch job, a placement group):
it is submitted when the trial waits, and cancelled when the allocation has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from dstrial.errors import MasterError
from dstrial.hosts.transport import Transport
from dstrial.master.backends.backend import Refusal

JobState = Literal["pending", "running", "leaving", "ended"]
"""Of an engine's job: it waits; it has its nodes; it loses them soon; it has none any more."""

MAX_PENDING = 32  # jobs in an engine's queue; further requests wait with the master


class EngineRefusedError(MasterError):
    """An engine rejects a job; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobRequest:
    """A request for nodes."""

    key: str  # ``trial-7`` or ``command-<task id>``; another master finds the job by it
    title: str  # of the job in the engine's own lists
    num_slots: int  # on all nodes together, at least 1
    is_on_one_node: bool = False  # whether the slots must be on one node
    excluded_nodes: frozenset[str] = frozenset()  # names of nodes that must not be used
    wants_devices: bool = False  # whether a slot is an accelerator; else a processor core
    # the user's ``slurm`` section of the experiment's config
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCapacity:
    """All slots of a node, used or not; a node that is not up may return."""

    num_slots: int
    is_up: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A job's slots on one node."""

    host: str
    num_slots: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineJob:
    """A job as its engine sees it."""

    id: str  # the engine's; one word for a shell
    key: str  # of its request
    state: JobState
    text: str  # state for people, with the engine's reason: ``job 12: pending (Resources: …)``
    parts: tuple[Part, ...] = ()  # in rank order; empty unless it runs or leaves


class Engine(Protocol):
    """An engine with a queue; its methods raise ConnectionError if it does not answer.

    One thread, never the scheduler's, calls it and may wait some seconds; any thread may call ``unsatisfiable_reasons``.

    Attributes:
        name: as its users write it, ``Slurm``.
    """

    name: str

    def nodes(self) -> Mapping[str, NodeCapacity]:
        """Return the engine's nodes by name."""
        ...

    def job_name(self, job_id: str) -> str:
        """Return a job's name for people: ``job 12``."""
        ...

    def unsatisfiable_reasons(self, request: JobRequest) -> Sequence[Refusal]:
        """Return why such a job could not run on the nodes that are up; empty if it may.

        Raises:
            OSError: the engine does not answer, or does not know now.
        """
        ...

    def submit(self, request: JobRequest) -> str:
        """Queue a job; return its id.

        Raises:
            EngineRefusedError: it is rejected.
        """
        ...

    def max_pending(self, num_slots: int) -> int:
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
