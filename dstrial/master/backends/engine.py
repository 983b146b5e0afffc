"""The seam for engines that have a queue of their own, Slurm or Ray.

It is what they are asked for, and what they answer.

An engine chooses the nodes after it was asked for slots. So what waits is
asked for as a *job* of the engine's: a batch job, a placement group. When the job runs, its nodes are nodes of the master's for
what it was asked for, and for nothing else; an allocation then begins there as it does on hosts. A job outlives the allocation
while its trial wants to run again.
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
    """An engine does not take a job, or could never start it.

    The message says why, and what to do.
    """


class EngineNotNowError(EngineRefusedError):
    """An engine does not take a job for now, and is asked again.

    Too many wait for it already, or nodes that it needs are down.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class JobRequest:
    """What an engine is asked for.

    Attributes:
        key: what it is for, as ``trial-7`` or ``command-<task id>``; found again by it under another master.
        title: of the job, as people read it in the engine's own lists.
        num_slots: on all nodes together, at least 1.
        is_on_one_node: whether they cannot be divided.
        kept_off: names of nodes that must not be used.
        wants_devices: whether each slot is an accelerator; a processor core else.
        may_wait: whether it is queued though nodes that it needs are down or drained.
        settings: the section of the experiment's config that has the engine's name (``slurm``), as the user has written it.
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
    """What a job has of one node."""

    host: str
    num_slots: int


@dataclasses.dataclass(frozen=True, slots=True)
class EngineJob:
    """A job as its engine sees it.

    Attributes:
        id: by which the engine knows it; a text that a shell takes as one word.
        key: what it was asked for.
        state: whether it has nodes.
        text: the same as a person reads it, with the engine's reason: ``job 12: pending (Resources: …)``.
        parts: what it has, in the order of ranks; empty unless it runs or leaves.
        is_beginning: whether it waits no more for nodes, and cannot be used yet.
        has_rest: whether the engine still keeps some of its nodes though it has ended: it is to be given back.
    """

    id: str
    key: str
    state: JobState
    text: str
    parts: tuple[Part, ...] = ()
    is_beginning: bool = False
    has_rest: bool = False


class Engine(Protocol):
    """An engine with a queue.

    One thread calls it, and may wait some seconds for each answer; it is never the scheduler's.

    ``why_never`` alone is called by any thread.

    Attributes:
        name: as its users write it, ``Slurm``.
    """

    name: str

    def capacity(self) -> Mapping[str, int]:
        """Return the slots of each node that is up, by its name.

        Those in use count as well as those that are not.

        Raises:
            ConnectionError: the engine does not answer.
        """
        ...

    def down(self) -> Mapping[str, int]:
        """Return the slots of nodes that are down or drained and may come back.

        They are those that ``capacity`` has seen last.
        """
        ...

    def spare(self) -> Mapping[str, int]:
        """Return the slots of each node that nobody uses.

        There are none while others wait for slots.

        Raises:
            ConnectionError: the engine does not answer.
        """
        ...

    def called(self, job_id: str) -> str:
        """Return what people call a job, ``job 12`` for example."""
        ...

    def why_never(self, request: JobRequest) -> Sequence[Refusal]:
        """Return why a job could never be had that nobody asks for yet.

        Nothing where it may be had.

        Raises:
            OSError: the engine does not answer, or cannot say it now.
        """
        ...

    def submit(self, request: JobRequest) -> str:
        """Ask for nodes; return the job's id.

        Raises:
            EngineRefusedError: it is refused, or could never be had.
            EngineNotNowError: it is refused for now.
            ConnectionError: the engine does not answer.
        """
        ...

    def most_pending(self, num_slots: int) -> int:
        """Return how many jobs may wait with the engine at once.

        What else waits does so with the master, in its order.

        Args:
            num_slots: of the largest of them.
        """
        ...

    def jobs(self) -> Sequence[EngineJob]:
        """Return the jobs of this master, also of one before it.

        That is one with the same state directory. Those that are over may be left out.

        Raises:
            ConnectionError: the engine does not answer.
        """
        ...

    def cancel(self, job_id: str) -> None:
        """Give a job's nodes back, or its place in the queue. Idempotent.

        Raises:
            ConnectionError: the engine does not answer.
        """
        ...

    def transport(self, job_id: str) -> Transport:
        """Return how programs are started on the nodes of a running job."""
        ...

    def close(self) -> None:
        """Leave the engine; its jobs stay."""
        ...
