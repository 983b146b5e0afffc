"""The interface between the scheduler and the back ends that run allocations.

An allocation is one run of a trial or command, on slots of one or more nodes. It survives a restart of the master: the new
master builds the same :class:`RunRef` from the allocation's database row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from dstrial.errors import MasterError
from dstrial.master.backends.devices import Slot
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.nodes import OWN_NODE, node_of

TRIAL = "TRIAL"
"""``task_type`` of a trial."""

Cause = Literal["exited", "lost", "unreachable", "preempted", "refused"]
"""Why an allocation ended on a node.

- exited: the entrypoint exited
- lost: the supervisor died, or the node was removed
- unreachable: the node did not answer for too long
- preempted: the master killed the processes, for example after a failure on another node
- refused: the node could not start the allocation
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A machine whose slots (accelerators or CPU cores) run ranks of trials."""

    id: int  # 0 for the master's own machine, ``nodes.id`` of the database for the others
    name: str  # for users, and in ``det agent list``
    address: str  # address at which other nodes reach it
    slots: tuple[Slot, ...]  # with ids that are unique in the cluster
    why_down: str | None  # why allocations cannot start on the node now; None if they can
    since_us: int  # time of the node's last change between up and down, microseconds since the epoch


@dataclasses.dataclass(frozen=True, slots=True)
class NodeAllocation:
    """An allocation's slots on one node; slot ids are unique in the cluster."""

    node_id: int
    slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunRef:
    """Reference to a starting or running allocation, with its directory and slots."""

    allocation_id: str
    directory: Path  # the allocation's files on the master's machine
    allocated: tuple[NodeAllocation, ...]  # at least one, in rank order
    supervisor: SupervisorHandle | None = None  # of the master's machine, if stored in the allocation's row

    @property
    def is_on_own_node(self) -> bool:
        return all(on_node.node_id == OWN_NODE for on_node in self.allocated)


@dataclasses.dataclass(frozen=True, slots=True)
class SupervisorHandle:
    """Identity of an allocation's supervisor process: pid, boot id and start time."""

    pid: int
    start_time: str


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationRequest:
    """Everything that a back end needs to start a trial or command on one node.

    Fields that only trials have are 0, empty or None for a command.
    """

    allocation_id: str  # ``{task_id}.{run_id}``
    task_id: str  # of the trial or command, the same in all its allocations
    trial_id: int
    experiment_id: int
    run_id: int  # number of the trial's run, from 1; each allocation is a run
    directory: Path  # for the allocation's files, absolute; created with mode 0700
    slots: tuple[Slot, ...]  # the allocation's slots on the node
    ports: dict[str, int]  # environment variable -> free port
    config: dict[str, Any]  # the experiment config with defaults
    hparams: dict[str, Any]  # the trial's hyperparameters
    trial_seed: int
    steps_completed: int  # batches at ``latest_checkpoint``; 0 without a checkpoint or for a warm start
    latest_checkpoint: str | None  # UUID of the checkpoint from which the trial continues
    session_token: str  # gives access to this trial only; valid until the allocation ends
    user_token: str  # the submitting user's; valid until the allocation ends
    username: str  # of the submitting user
    master_url: str  # address of the master for the trial's reports
    cluster_id: str  # id of the master's database
    master_id: str  # id of the master's process, a new one at each start
    agent_id: str  # name of the node
    resources_id: str  # a UUID; also the container id
    model_definition: bytes  # gzip tar of the context directory; empty for none
    entrypoint: str | list[str]
    interpreter: str | None = None  # Python of the trial, absolute; None for the master's
    startup_hook: str = ""  # shell lines from the master's settings, run before the entrypoint
    task_type: str = TRIAL  # ``TRIAL``, ``COMMAND``, ``TENSORBOARD`` or ``GENERIC``
    working_directory: str | None = None  # absolute; None for the directory with the model definition
    log_bytes: int | None = None  # size limit of output that the master has not read; None: unlimited
    storage: str | None = None  # path of the checkpoint storage; None if it has no marker
    # name in ``events/`` of the directory -> target directory
    links: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    addresses: tuple[str, ...] = ("127.0.0.1",)  # all nodes of the allocation, in rank order
    node_rank: int = 0
    slot_counts: tuple[int, ...] = ()  # number of slots on each node; empty if there is only one node
    # environment variables; a variable of the same name from any other source takes precedence
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all fields except the model definition; inverse of :meth:`from_json`."""
        links = {name: str(path) for name, path in self.links.items()}
        plain = {**dataclasses.asdict(self), "directory": str(self.directory), "links": links}
        del plain["model_definition"]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], model_definition: bytes) -> AllocationRequest:
        fields = dict(plain)
        fields["directory"] = Path(fields["directory"])
        fields["slots"] = tuple(Slot(**slot) for slot in fields["slots"])
        fields["links"] = {name: Path(path) for name, path in fields["links"].items()}
        fields["addresses"] = tuple(fields["addresses"])
        fields["slot_counts"] = tuple(fields["slot_counts"])
        return cls(**fields, model_definition=model_definition)

    @property
    def venvs_path(self) -> Path:
        """Directory of virtual environments, shared by all allocations on the node."""
        return self.directory.parent.with_name("venvs")

    @property
    def task_name(self) -> str:
        return (
            f"trial {self.trial_id}"
            if self.task_type == TRIAL
            else f"{self.task_type.lower()} {self.task_id}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NodeExit:
    """How an allocation ended on one node."""

    node_id: int
    exit_code: int  # of the entrypoint on the node, as in a shell
    signal: int | None  # signal that ended the entrypoint; None if it exited by itself
    cause: Cause
    text: str | None = None  # reason for users; None if the exit code says all


@dataclasses.dataclass(frozen=True, slots=True)
class AllocationExit:
    """How an allocation ended, summarised over all its nodes."""

    exit_code: int  # of the entrypoint that failed first, as in a shell
    signal: int | None  # signal that ended this entrypoint; None if it exited by itself
    time_us: int  # time of the exit, microseconds since the epoch
    explanation: str | None  # reason for users; None if the exit code says all
    was_lost: bool  # whether a supervisor or its node was lost, so that there is no record of the exit
    nodes: tuple[NodeExit, ...] = ()  # exits on all nodes except the master's own, in order of arrival


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """A directory on the master's machine with an allocation's output on one node."""

    node_id: int
    directory: Path


class SlotsGoneError(MasterError):
    """Raised if an allocation lost its slots before its start.

    The error does not count as a failure of the trial.
    """


Key: TypeAlias = int | str
"""Id of a trial (its number) or of a command (its task id) that requests slots."""


@dataclasses.dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Slots that a waiting trial or command requests from Slurm or Ray."""

    key: Key
    num_slots: int  # at least 1
    is_on_one_node: bool  # whether the slots must be on one node
    excluded_nodes: frozenset[int]  # ids of nodes that must not be used
    # returns a title for users and the experiment's config
    describe: Callable[[], tuple[str, Mapping[str, Any]]]
    fewer: tuple[int, ...] = ()  # acceptable smaller numbers of slots, largest first
    may_wait: bool = False  # whether the request may wait until more nodes join the cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Why Slurm or Ray cannot run a job, as the parts of an error message."""

    key: str  # dotted path in the config
    got: str  # the config's value at ``key``, for users
    expected: str  # the accepted values as text, without a full stop
    fix: str  # one imperative sentence
    is_for_nodes: bool = False  # whether the job could run if more nodes joined the cluster


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Result of ``Backend.request``: slots, failures and log messages."""

    # trial or command -> ids of the slots that its request was granted, in rank order
    slots: Mapping[Key, Sequence[int]] = dataclasses.field(default_factory=dict)
    # trial or command -> why its request fails: too many of its jobs have failed
    refused: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    # trial or command -> new message for its log; each message is returned in one answer only
    messages: Mapping[Key, str] = dataclasses.field(default_factory=dict)


class Backend(Protocol):
    """Runs allocations on nodes; the interface that the scheduler calls.

    Methods with a body are the defaults of back ends without Slurm or Ray, where the master assigns slots. Only the scheduler's
    thread calls the methods, except ``nodes``, ``job_text`` and ``unsatisfiable_reasons``, which are thread-safe. Only
    ``unsatisfiable_reasons`` waits for responses of Slurm or Ray.
    """

    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes, including nodes that are down. Slot ids never change."""

    def request(self, requests: Iterable[ResourceRequest]) -> Answer | None:
        """Return slots for waiting requests; None if the master itself assigns the slots.

        ``requests`` has a request for each waiting trial and command, the most urgent first. The scheduler calls the method at
        each poll, even without requests, because this method submits and cancels Slurm and Ray jobs.
        """
        del requests
        return None

    def unsatisfiable_reasons(self, request: ResourceRequest) -> Sequence[Refusal]:
        """Return why Slurm or Ray would reject a request.

        Empty if the request would be accepted, or if Slurm or Ray does not answer. May block for some seconds.
        """
        del request
        return ()

    def job_text(self, key: Key) -> str:
        """Return the state of a trial's or command's Slurm or Ray job; "" without a job."""
        del key
        return ""

    def leaving_reason(self, run: RunRef) -> str | None:
        """Return why an allocation will soon lose its slots; None otherwise."""
        del run
        return None

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        """Start an allocation; return its supervisor if that is on the master's machine.

        On other machines, supervisors start after the call: the result is None, and ``supervisors`` returns them later.

        Raises:
            SlotsGoneError: the allocation's slots are gone.
            DstrialError: the allocation cannot be started. If another machine rejects the allocation after the call, ``observe``
                returns its exit.
        """

    def find(self, run: RunRef) -> SupervisorHandle | None:
        """Return an allocation's running supervisor, even if an earlier master started it.

        None if no supervisor is known to run.
        """

    def supervisors(self, run: RunRef) -> Mapping[int, SupervisorHandle]:
        """Return node id -> supervisor, for an allocation's started supervisors."""

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Return how an allocation ended; None while it runs.

        If a supervisor has died, the allocation's other processes are killed.
        """

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        """Return the directories of an allocation's output, one per node.

        The directory of the node that failed first comes first.
        """

    def notes(self, run: RunRef) -> Sequence[str]:
        """Return warnings to add to an allocation's log; later calls return only new ones."""
        del run
        return ()

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        """Return uuids of checkpoints that an allocation began to save and did not report."""

    def ask_to_stop(self, run: RunRef) -> None:
        """Send SIGTERM to an allocation's entrypoint on each node.

        Once an entrypoint exits, the allocation's other processes on its node are killed.
        """

    def kill(self, run: RunRef, *, leaves_record: bool = True) -> None:
        """Kill an allocation's processes; its supervisors record the exit, then end.

        With ``leaves_record=False``, the supervisors are killed, too, and the allocation counts as lost. Use this on a full
        disk, on which no supervisor can write its record.
        """

    def forget(self, run: RunRef) -> None:
        """Delete the files of an ended allocation, on all nodes."""

    def begin(self) -> None:
        """Connect to the nodes; may block for some seconds.

        The scheduler calls the method after ``find`` has been called for all running allocations. If the method raises, the
        scheduler calls it again after a backoff.
        """

    def poll(self, *, is_busy: bool) -> None:
        """End fork servers past their idle timeout; update the back end's status file.

        The scheduler calls the method repeatedly. While ``is_busy`` (any allocation runs), no fork server counts as idle.
        """

    def close(self) -> None:
        """Disconnect from the nodes; allocations keep running."""


def run_of(allocation: Allocation) -> RunRef:
    """Return a reference to the allocation that a row of the database describes.

    An allocation without slots is on the master's machine.
    """
    allocated: dict[int, list[int]] = {}
    for slot_id in allocation.slots:
        allocated.setdefault(node_of(slot_id), []).append(slot_id)
    parts = tuple(NodeAllocation(node_id, tuple(ids)) for node_id, ids in allocated.items())
    supervisor = (
        SupervisorHandle(allocation.supervisor_pid, allocation.supervisor_start)
        if allocation.supervisor_pid is not None and allocation.supervisor_start is not None
        else None
    )
    return RunRef(
        allocation.id, Path(allocation.directory), parts or (NodeAllocation(OWN_NODE, ()),), supervisor
    )
