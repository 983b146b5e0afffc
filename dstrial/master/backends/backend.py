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
    """A machine that offers slots.

    Attributes:
        id: 0 for the master's own machine, ``nodes.id`` of the database for the others.
        name: as the user and ``det agent list`` call it.
        address: at which the other nodes reach it.
        slots: what it offers; their ids are those of the whole cluster.
        why_down: why nothing can be started there now; None if something can.
        since_us: since when it is as it is.
    """

    id: int
    name: str
    address: str
    slots: tuple[Slot, ...]
    why_down: str | None
    since_us: int


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """An allocation's slots on one node, by cluster-wide ids."""

    node_id: int
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunRef:
    """Name an allocation to back ends.

    Attributes:
        directory: of its files on the master's machine.
        shares: at least one, in rank order.
        supervisor: on the master's own machine, once the row has it.
    """

    allocation_id: str
    directory: Path
    shares: tuple[Share, ...]
    supervisor: SupervisorHandle | None = None

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
    """How an allocation ended on one node.

    Attributes:
        exit_code: of the entrypoint there, as a shell sees it.
        text: why, where the exit code alone does not say.
    """

    node_id: int
    exit_code: int
    signal: int | None
    cause: Cause
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationExit:
    """How an allocation ended.

    Attributes:
        exit_code: of the entrypoint that failed first, as a shell sees it.
        explanation: what the exit code means, None for 0.
        was_lost: a supervisor or its node died without a record, and the entrypoint with it.
        nodes: exits of all nodes but the master's own, in the order of arrival.
    """

    exit_code: int
    signal: int | None
    time_us: int
    explanation: str | None
    was_lost: bool
    nodes: tuple[NodeExit, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The local directory with one node's output, for ``log_file.read_lines``."""

    node_id: int
    directory: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A line that the back end adds to an allocation's log.

    Attributes:
        tells_progress: whether the last reported batch belongs to it.
    """

    text: str
    level: str
    tells_progress: bool = False


class SlotsGoneError(MasterError):
    """An allocation lost its slots before it began; the allocation is not at fault."""


Key: TypeAlias = int | str
"""What wants slots: a trial's number, or a command's task id."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Slots that a waiting trial or command requests from an engine.

    Attributes:
        num_slots: at least 1.
        is_on_one_node: whether the slots must be on one node.
        excluded_nodes: ids of nodes that must not be used.
        describe: returns a title for people and the experiment's config.
        fewer: acceptable smaller numbers of slots, largest first.
        may_wait: whether it is accepted though it needs more nodes than there are now.
    """

    key: Key
    num_slots: int
    is_on_one_node: bool
    excluded_nodes: frozenset[int]
    describe: Callable[[], tuple[str, Mapping[str, Any]]]
    fewer: tuple[int, ...] = ()
    may_wait: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job cannot run, as a problem of the experiment's config.

    Attributes:
        key: dotted path in the config.
        got: the value there, for people.
        expected: what would be accepted, without a full stop.
        fix: one imperative sentence.
        is_for_nodes: whether nodes are missing, which may change when others join.
    """

    key: str
    got: str
    expected: str
    fix: str
    is_for_nodes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a back end has for waiting requests.

    Attributes:
        slots: requests that may begin, with slot ids in rank order.
        refused: requests whose jobs have failed too often, with the reason.
        messages: new messages for waiting requests, each once.
    """

    slots: Mapping[Key, Sequence[int]] = dataclasses.field(default_factory=dict)
    refused: Mapping[Key, str] = dataclasses.field(default_factory=dict)
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

    def why_leaving(self, run: RunRef) -> str | None:
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
        """Return how a run ended, None while it runs; processes of a lost one are killed."""

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        """Return where the output is, first of all that of the node that failed first."""

    def notes(self, run: RunRef) -> Sequence[Note]:
        """Return new lines for the run's log, each once."""

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        """Return uuids of checkpoints that were begun and not reported."""

    def ask_to_stop(self, run: RunRef) -> None:
        """Send the entrypoints SIGTERM; the rest is killed when they have ended."""

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
        """Release everything; what runs goes on."""


class OwnNodes:
    """Answers of a back end whose nodes belong to the master: there is no engine."""

    def request(self, requests: Iterable[ResourceRequest]) -> Answer | None:
        del requests
        return None

    def unsatisfiable_reasons(self, request: ResourceRequest) -> Sequence[Refusal]:
        del request
        return ()

    def job_text(self, key: Key) -> str:
        del key
        return ""

    def why_leaving(self, run: RunRef) -> str | None:
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
