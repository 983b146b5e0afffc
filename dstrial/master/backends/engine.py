"""The interface to engines (Slurm, Ray), which queue jobs and choose their nodes.

Each allocation is one *job* of the engine: a batch job of Slurm, a placement group of Ray. The master submits the job when the
trial is queued, and cancels it when the allocation has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from dstrial.errors import MasterError
from dstrial.hosts.transport import Transport
from dstrial.master.backends.backend import Refusal

JobState = Literal["pending", "running", "leaving", "ended"]
"""State of a Slurm or Ray job.

- pending: waits for nodes
- running: has nodes
- leaving: will soon lose its nodes
- ended: has lost its nodes, or has been cancelled
"""

MAX_PENDING = 32  # maximum number of dstrial's jobs in an engine's queue; the master queues the others


class EngineRefusedError(MasterError):
    """Raised if Slurm or Ray rejects a job; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class JobRequest:
    """A request to Slurm or Ray for a job that holds the slots of one allocation."""

    key: str  # ``trial-7`` or ``command-<task id>``; a restarted master finds the job by its key
    title: str  # the job's title in the engine's own lists
    num_slots: int  # on all nodes together, at least 1
    is_on_one_node: bool = False  # whether the slots must be on one node
    excluded_nodes: frozenset[str] = frozenset()  # names of nodes that must not be used
    wants_devices: bool = False  # whether a slot is an accelerator; else a CPU core
    # the user's ``slurm`` section of the experiment's config
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class NodeCapacity:
    """Total number of a node's slots, and whether the node is up."""

    num_slots: int
    is_up: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Slots of a Slurm or Ray job on one node."""

    host: str
    num_slots: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineJob:
    """The state of a job, as Slurm or Ray reports it."""

    id: str  # assigned by the engine; has no characters that a shell interprets
    key: str  # key of the ``JobRequest`` for the job
    state: JobState
    text: str  # state for users, with the engine's reason: ``job 12: pending (Resources)``
    parts: tuple[Part, ...] = ()  # in rank order; empty unless the state is running or leaving


class Engine(Protocol):
    """Slurm or Ray, which queues jobs and chooses their nodes.

    Methods may block for some seconds, and raise ConnectionError if Slurm or Ray does not answer. Only
    ``unsatisfiable_reasons`` is thread-safe.

    Attributes:
        name: ``Slurm`` or ``Ray``, for messages.
    """

    name: str

    def nodes(self) -> Mapping[str, NodeCapacity]:
        """Return node name -> number of slots and state (up or down)."""

    def job_name(self, job_id: str) -> str:
        """Return a job's name for users: ``job 12``."""

    def unsatisfiable_reasons(self, request: JobRequest) -> Sequence[Refusal]:
        """Return why a job does not fit on the nodes that are up; empty if it fits.

        Raises:
            OSError: Slurm or Ray does not answer, or cannot check the job at present.
        """

    def submit(self, request: JobRequest) -> str:
        """Submit a job; return the id that Slurm or Ray gives it.

        Raises:
            EngineRefusedError: Slurm or Ray rejects the job.
        """

    def max_pending(self, num_slots: int) -> int:
        """Return how many jobs, of at most ``num_slots`` each, may be pending at a time.

        The master submits further jobs later, in the order of its own queue.
        """

    def jobs(self) -> Sequence[EngineJob]:
        """Return the jobs of this and earlier masters; ended jobs may be missing."""

    def cancel(self, job_id: str) -> None:
        """Cancel a pending or running job. Idempotent."""

    def transport(self, job_id: str) -> Transport:
        """Return the ``Transport`` that starts programs on a running job's nodes."""

    def close(self) -> None:
        """Disconnect from Slurm or Ray; jobs keep running."""
