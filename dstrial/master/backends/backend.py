"""The interface between the scheduler and the back ends that run allocations.

A back end runs allocations on nodes; a node is a machine with slots. An allocation survives the master: the next master refers
to it by the same :class:`RunRef`, which follows from the allocation's row alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from dstrial.errors import MasterError
from dstrial.master.backends.devices import Slot
from dstrial.master.backends.request import AllocationRequest
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.nodes import OWN_NODE, node_of

Cause = Literal["exited", "lost", "unreachable", "preempted", "refused"]
"""How an allocation ended on a node: its entrypoint ended; it was lost with its supervisor; the node did not answer for too
long; it was ended because another node's part had failed; it was never started there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A machine that offers slots."""

    id: int  # 0 for the master's own machine, ``nodes.id`` of the database for the others
    name: str  # as the user and ``det agent list`` call it
    address: str  # at which the other nodes reach it
    slots: tuple[Slot, ...]  # with ids that are unique in the cluster
    why_down: str | None  # why nothing can be started there now; None if something can
    since_us: int  # time of its last change between up and down


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """An allocation's slots on one node, by cluster-wide ids."""

    node_id: int
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunRef:
    """Name an allocation to back ends."""

    allocation_id: str
    directory: Path  # of its files on the master's machine
    shares: tuple[Share, ...]  # at least one, in rank order
    supervisor: SupervisorHandle | None = None  # on the master's own machine, once the row has it

    @property
    def is_on_own_node(self) -> bool:
        return all(share.node_id == OWN_NODE for share in self.shares)


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorHandle:
    """Identify a supervisor; ``start_time`` is the kernel's, with its boot id."""

    pid: int
    start_time: str


@dataclasses.dataclass(frozen=True, slots=True)
class NodeExit:
    """How an allocation ended on one node."""

    node_id: int
    exit_code: int  # of the entrypoint there, as a shell sees it
    signal: int | None
    cause: Cause
    text: str | None = None  # reason, if the exit code does not tell it


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationExit:
    """How an allocation ended."""

    exit_code: int  # of the entrypoint that failed first, as a shell sees it
    signal: int | None
    time_us: int
    explanation: str | None  # what the exit code means, None for 0
    was_lost: bool  # a supervisor or its node died without a record, and the entrypoint with it
    nodes: tuple[NodeExit, ...] = ()  # exits of all nodes but the master's own, in the order of arrival


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The local directory with one node's output, for ``log_file.read_lines``."""

    node_id: int
    directory: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A line that the back end adds to an allocation's log."""

    text: str
    level: str
    tells_progress: bool = False  # whether the last reported batch belongs to it


class SlotsGoneError(MasterError):
    """An allocation lost its slots before it began; the allocation is not at fault."""


Key: TypeAlias = int | str
"""What wants slots: a trial's number, or a command's task id."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Slots that a waiting trial or command requests from an engine."""

    key: Key
    num_slots: int  # at least 1
    is_on_one_node: bool  # whether the slots must be on one node
    excluded_nodes: frozenset[int]  # ids of nodes that must not be used
    # returns a title for people and the experiment's config
    describe: Callable[[], tuple[str, Mapping[str, Any]]]
    fewer: tuple[int, ...] = ()  # acceptable smaller numbers of slots, largest first
    may_wait: bool = False  # whether it is accepted though it needs more nodes than there are now


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job cannot run, as a problem of the experiment's config."""

    key: str  # dotted path in the config
    got: str  # the value there, for people
    expected: str  # what would be accepted, without a full stop
    fix: str  # one imperative sentence
    is_for_nodes: bool = False  # whether nodes are missing, which may change when others join


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a back end has for waiting requests."""

    # requests that may begin, with slot ids in rank order
    slots: Mapping[Key, Sequence[int]] = dataclasses.field(default_factory=dict)
    # requests whose jobs have failed too often, with the reason
    refused: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    # new messages for waiting requests, each once
    messages: Mapping[Key, str] = dataclasses.field(default_factory=dict)


class Backend(Protocol):
    """Runs allocations.

    The scheduler's thread calls all methods; any thread may call ``nodes``, ``job_text`` and ``unsatisfiable_reasons``. Only
    ``unsatisfiable_reasons`` waits for another machine.
    """

    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes, including those that are down. A slot keeps its id for ever."""

    def request(self, requests: Iterable[ResourceRequest]) -> Answer | None:
        """Return which requests have got slots; None if :meth:`nodes` are free for all.

        Called at each poll of the queue, also when nothing waits. ``requests`` has the most urgent first.
        """

    def unsatisfiable_reasons(self, request: ResourceRequest) -> Sequence[Refusal]:
        """Return why an engine rejects a request; empty if it does not, or if unknown.

        May wait some seconds for the engine.
        """

    def job_text(self, key: Key) -> str:
        """Return the state of the engine's job for a key; empty without one."""

    def leaving_reason(self, run: RunRef) -> str | None:
        """Return why a run must give its slots back soon; None if it need not."""

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        """Start an allocation; return its supervisor, None if :meth:`find` has it later.

        Raises:
            SlotsGoneError: its slots are gone.
            DstrialError: it cannot be started; a node's refusal that arrives later is an exit.
        """

    def find(self, run: RunRef) -> SupervisorHandle | None:
        """Return the supervisor of a run, also of one that another master started."""

    def supervisors(self, run: RunRef) -> Mapping[int, SupervisorHandle]:
        """Return known supervisors by node: one a share, once all have started."""

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Return how a run ended, None while it runs; kill the processes of a lost run."""

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        """Return where the output is, first of all that of the node that failed first."""

    def notes(self, run: RunRef) -> Sequence[Note]:
        """Return new lines for the run's log, each once."""

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        """Return uuids of checkpoints that were begun and not reported."""

    def ask_to_stop(self, run: RunRef) -> None:
        """Send the entrypoints SIGTERM; other processes are killed after them."""

    def kill(self, run: RunRef, *, leaves_record: bool = True) -> None:
        """Kill every process of a run.

        ``leaves_record=False`` also kills supervisors, which wait for room to write on a full disk: the run is then lost.
        """

    def resident_bytes(self, run: RunRef) -> int:
        """Return the memory of a run; 0 if unknown."""

    def forget(self, run: RunRef) -> None:
        """Delete the files of an ended run, on all nodes."""

    def begin(self) -> None:
        """Connect to the nodes within some seconds; after :meth:`find` of all that runs.

        Called again, after a backoff, if it raises.
        """

    def poll(self, *, is_busy: bool) -> None:
        """Do periodic work; ``is_busy`` while anything runs."""

    def close(self) -> None:
        """Disconnect; allocations continue."""


class OwnNodes:
    """Methods of a back end without an engine."""

    def request(self, requests: Iterable[ResourceRequest]) -> Answer | None:
        del requests
        return None

    def unsatisfiable_reasons(self, request: ResourceRequest) -> Sequence[Refusal]:
        del request
        return ()

    def job_text(self, key: Key) -> str:
        del key
        return ""

    def leaving_reason(self, run: RunRef) -> str | None:
        del run
        return None


def run_of(allocation: Allocation) -> RunRef:
    """Build a :class:`RunRef`; without slots it runs on the master's own machine."""
    shares: dict[int, list[int]] = {}
    for slot_id in allocation.slots:
        shares.setdefault(node_of(slot_id), []).append(slot_id)
    parts = tuple(Share(node_id, tuple(ids)) for node_id, ids in shares.items())
    supervisor = (
        SupervisorHandle(allocation.supervisor_pid, allocation.supervisor_start)
        if allocation.supervisor_pid is not None and allocation.supervisor_start is not None
        else None
    )
    return RunRef(allocation.id, Path(allocation.directory), parts or (Share(OWN_NODE, ()),), supervisor)
