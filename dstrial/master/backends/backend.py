"""The seam for where allocations run.

It is what a back end is asked, and what it answers. A back end runs allocations on nodes; a node is a machine with slots. What
runs needs no master to live: a restarted one asks again by the same :class:`RunRef`, which follows from the allocation's row
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
    """What an allocation has of one node: ids of slots of the whole cluster."""

    node_id: int
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunRef:
    """An allocation as back ends know it.

    Attributes:
        directory: of its files on the master's machine.
        shares: at least one, in the order of its ranks.
        supervisor: on the master's own machine, once the row has it.
    """

    allocation_id: str
    directory: Path
    shares: tuple[Share, ...]
    supervisor: SupervisorHandle | None = None

    @property
    def is_on_own_node(self) -> bool:
        """Whether it runs on the master's own machine."""
        return all(share.node_id == OWN_NODE for share in self.shares)


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorHandle:
    """A supervisor, by what no other process shares with it.

    Attributes:
        start_time: when it started, as the kernel tells, with the boot it belongs to.
    """

    pid: int
    start_time: str


@dataclasses.dataclass(frozen=True, slots=True)
class NodeExit:
    """How an allocation ended on one node.

    Attributes:
        node_id: which one.
        exit_code: of the entrypoint there, as a shell sees it.
        signal: that ended it, None if none did.
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
        exit_code: of the entrypoint, as a shell sees it; of several nodes' that which failed first.
        signal: that ended it, None if none did.
        explanation: what the exit code means, None for 0.
        was_lost: a supervisor died without leaving a record, or a node with it; the entrypoint died with it.
        nodes: how it ended on each node but the master's own, in the order in which that was heard.
    """

    exit_code: int
    signal: int | None
    time_us: int
    explanation: str | None
    was_lost: bool
    nodes: tuple[NodeExit, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Where a node's part of an allocation's output lies, on the master's machine.

    Attributes:
        node_id: which node's.
        directory: for :func:`dstrial.master.backends.log_file.read_lines`.
    """

    node_id: int
    directory: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A line of the back end's own for an allocation's log.

    Attributes:
        level: logging's name of it.
        tells_progress: whether the last batch that was reported belongs to it.
    """

    text: str
    level: str
    tells_progress: bool = False


class SlotsGoneError(MasterError):
    """Slots are gone that were there when an allocation was given them.

    It has lost them before it began, and is at no fault.
    """


Key: TypeAlias = int | str
"""What wants slots: a trial's number, or a command's task id."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What waits for slots, as a back end is told that has to ask an engine for them.

    Attributes:
        key: who wants them.
        num_slots: how many, at least 1.
        is_on_one_node: whether they cannot be divided.
        kept_off: nodes that must not be used.
        describe: returns what is asked for only once: a title for people, and the experiment's config.
        fewer: numbers of slots with which it goes on where it cannot have so many, the most first.
        has_run: whether it has run before: what is refused now was possible once.
        is_growth: whether it runs, with fewer slots, and would go on with so many.
        is_move: whether it has stopped for so many, and gives back a job that has fewer.
        off: those nodes that must not be used because a person has switched them off, for now.
    """

    key: Key
    num_slots: int
    is_on_one_node: bool
    kept_off: frozenset[int]
    describe: Callable[[], tuple[str, Mapping[str, Any]]]
    fewer: tuple[int, ...] = ()
    has_run: bool = False
    is_growth: bool = False
    is_move: bool = False
    off: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why a job could never be had, as a problem of the experiment's config.

    Attributes:
        key: dotted, where that stands in the config.
        got: what stands there, as a person reads it.
        expected: what would be taken, without a full stop.
        fix: one imperative sentence.
        is_for_nodes: whether it is so because no nodes are there for it, which others that come may change.
    """

    key: str
    got: str
    expected: str
    fix: str
    is_for_nodes: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a back end has got for those that wait.

    Attributes:
        slots: who may begin, or grow, with the ids of its slots in the order of its ranks.
        refused: who can never begin, with the reason.
        told: what is new of those that wait, each once.
    """

    slots: Mapping[Key, Sequence[int]] = dataclasses.field(default_factory=dict)
    refused: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    told: Mapping[Key, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Lent:
    """What an engine with a queue has for somebody.

    Attributes:
        num_slots: of the largest job that runs for it, and is not about to end; without nodes that are lost.
        spare: slots by node that nobody uses or waits for, those of a job for it in which nothing runs among them.
    """

    num_slots: int = 0
    spare: Mapping[int, int] = dataclasses.field(default_factory=dict)


class Backend(Protocol):
    """Runs allocations.

    All methods are called by the scheduler's thread, ``nodes``, ``job_text`` and ``why_never`` by any.
    None of them but ``why_never`` waits for another machine.
    """

    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes, also those that are down.

        A slot that was there once keeps its id.
        """

    def request(self, wishes: Iterable[Wish], kept: Collection[Key]) -> Answer | None:
        """Say who has got slots.

        None where those of :meth:`nodes` are free for whoever is next. Called at each look at the queue, also when nobody waits.

        Args:
            wishes: who waits, the most urgent first.
            kept: who runs.
        """

    def why_never(self, wish: Wish) -> Sequence[Refusal]:
        """Return why an engine would never start what nobody has asked for yet.

        Nothing where it may, or that is not known.

        May wait some seconds for the engine.
        """

    def job_text(self, key: Key) -> str:
        """Return how the engine's job for somebody is; empty where there is none."""

    def lent(self, key: Key) -> Lent | None:
        """Return what an engine has for somebody.

        None where slots are those of :meth:`nodes`.
        """

    def why_leaving(self, run: RunRef) -> str | None:
        """Return why its slots have to be given back soon; None if they need not."""

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        """Start an allocation.

        Returns:
            Its supervisor; None where :meth:`find` has it later.

        Raises:
            SlotsGoneError: its slots are not there any more.
            DstrialError: it cannot be started; a node's refusal that is heard later is an exit.
        """

    def find(self, run: RunRef) -> SupervisorHandle | None:
        """Return the supervisor of a run that has started; None else.

        It may have started under another master.
        """

    def supervisors(self, run: RunRef) -> Mapping[int, SupervisorHandle]:
        """Return the supervisors that are known, by node.

        There are as many as it has shares, once it has started everywhere.
        """

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Return how it ended, None while it runs.

        Of what is lost every process is ended first.
        """

    def stopped_supervisor(self, run: RunRef) -> int | None:
        """Return the pid of a supervisor that is stopped; None if none is.

        SIGSTOP or a debugger holds it.
        """

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        """Return where its output is read, the node that failed first before the others."""

    def notes(self, run: RunRef) -> Sequence[Note]:
        """Return what is to be said in its log, once."""

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        """Return the checkpoints that it has begun and not reported, by uuid."""

    def ask_to_stop(self, run: RunRef) -> None:
        """Send its entrypoints SIGTERM; the rest is killed when they have ended."""

    def kill(self, run: RunRef, *, leaves_record: bool = True) -> None:
        """Kill every process of it.

        Args:
            run: which one.
            leaves_record: False kills supervisors too, which wait for room to write on a full disk: it is lost then.
        """

    def resident_bytes(self, run: RunRef) -> int:
        """Return its memory in bytes; 0 where that is not known."""

    def forget(self, run: RunRef) -> None:
        """Delete what an ended run has left, everywhere."""

    def begin(self) -> None:
        """Connect to the nodes, and wait some seconds at most.

        Called once all that runs was looked for by :meth:`find`.
        """

    def look(self, *, is_busy: bool) -> None:
        """Do what is due from time to time; ``is_busy`` while anything runs."""

    def close(self) -> None:
        """Give everything back; what runs goes on."""


def run_of(allocation: Allocation, slots: Sequence[int]) -> RunRef:
    """Return what back ends call an allocation. Pure.

    Args:
        allocation: its row.
        slots: ids of its slots; without one it runs on the master's own machine.
    """
    shares: dict[int, list[int]] = {}
    for slot_id in slots:
        shares.setdefault(node_of(slot_id), []).append(slot_id)
    parts = tuple(Share(node_id, tuple(ids)) for node_id, ids in shares.items())
    supervisor = (
        SupervisorHandle(allocation.supervisor_pid, allocation.supervisor_start)
        if allocation.supervisor_pid is not None and allocation.supervisor_start is not None
        else None
    )
    return RunRef(allocation.id, Path(allocation.directory), parts or (Share(OWN_NODE, ()),), supervisor)
