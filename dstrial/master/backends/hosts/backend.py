"""Run allocations with slots on other machines, others on the master's machine."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.file_writes import remove_tree
from dstrial.hosts.hostfile import Host
from dstrial.master.backends.backend import (
    AllocationExit,
    AllocationRequest,
    Backend,
    Node,
    NodeAllocation,
    NodeExit,
    Output,
    RunRef,
    SupervisorHandle,
)
from dstrial.master.backends.hosts.link import AgentSettings, HostLink, RemoteRun
from dstrial.master.backends.local import LocalBackend, begun_checkpoints
from dstrial.master.backends.status import HOSTS_NAME, ShownHost, StatusFile
from dstrial.master.clock import now_us

_BEGIN_S = 8.0  # timeout of the first connections to all hosts
_EXIT_GRACE_S = 5.0  # grace period in which ranks on other nodes may exit after a node has failed


class LinkedBackend(Backend, abc.ABC):
    """Base of back ends that run allocations on other nodes.

    A link (``HostLink``) is the connection to a node's agent. Allocations without slots run on the master's machine.
    """

    def __init__(self, local: LocalBackend, state_dir: Path) -> None:
        self._local = local
        self._status = StatusFile(state_dir / HOSTS_NAME)
        # Allocations that are being killed because a node failed -> the exit of an unreachable node, else None.
        self._terminating: dict[str, NodeExit | None] = {}

    @abc.abstractmethod
    def _link_to(self, run: RunRef, on_node: NodeAllocation) -> HostLink | None:
        """Return the link to a node of an allocation; None if the master has no such node."""

    def _unlinked_reason(self, run: RunRef, on_node: NodeAllocation) -> str:
        del run
        return (
            f"node {on_node.node_id} is no longer in the master's hostfile; expected one of its hosts. Start the master "
            "with its previous hostfile."
        )

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        if run.is_on_own_node:
            return self._local.submit(request, run)
        links = [self._require_link(run, on_node) for on_node in run.allocated]
        run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports = links[0].pop_ports() or request.ports
        nodes = [link.node() for link in links]
        addresses = tuple(node.address for node in nodes) if len(nodes) > 1 else ("127.0.0.1",)
        for rank, (on_node, link) in enumerate(zip(run.allocated, links, strict=True)):
            node_request = dataclasses.replace(
                request,
                slots=(),
                ports=ports,
                addresses=addresses,
                node_rank=rank,
                slot_counts=tuple(len(one.slots) for one in run.allocated),
            )
            link.submit(run.allocation_id, self._new_remote_run(run, on_node, link, node_request))
        return None

    def _require_link(self, run: RunRef, on_node: NodeAllocation) -> HostLink:
        link = self._link_to(run, on_node)
        if link is None:
            raise MasterError(self._unlinked_reason(run, on_node))
        return link

    def _new_remote_run(
        self, run: RunRef, on_node: NodeAllocation, link: HostLink, request: AllocationRequest | None
    ) -> RemoteRun:
        mirror = self._mirror(run, on_node)
        mirror.mkdir(mode=0o700, parents=True, exist_ok=True)
        return RemoteRun(mirror, request, link.numbers_of(on_node.slots), _ranks_of(run, on_node))

    def _mirror(self, run: RunRef, on_node: NodeAllocation) -> Path:
        # The first node's mirror is the run's directory, which the status and the page read.
        return run.directory if on_node == run.allocated[0] else run.directory / f"node-{on_node.node_id}"

    def _remote_runs(self, run: RunRef) -> list[tuple[HostLink | None, RemoteRun]]:
        """Return (link, state) for each node of an allocation.

        If the node is gone, the link is None, and the state is a lost allocation.
        """
        found: list[tuple[HostLink | None, RemoteRun]] = []
        for on_node in run.allocated:
            link = self._link_to(run, on_node)
            if link is None:
                gone = NodeExit(on_node.node_id, 137, 9, "lost", self._unlinked_reason(run, on_node))
                remote = RemoteRun(self._mirror(run, on_node), None, (), "", exit=gone)
            else:
                remote = link.run(run.allocation_id) or link.recover(
                    run.allocation_id, self._new_remote_run(run, on_node, link, None)
                )
            found.append((link, remote))
        return found

    def find(self, run: RunRef) -> SupervisorHandle | None:
        if run.is_on_own_node:
            return self._local.find(run)
        return self._remote_runs(run)[0][1].handle

    def supervisors(self, run: RunRef) -> Mapping[int, SupervisorHandle]:
        if run.is_on_own_node:
            return self._local.supervisors(run)
        return {
            on_node.node_id: remote.handle
            for on_node, (_, remote) in zip(run.allocated, self._remote_runs(run), strict=True)
            if remote.handle is not None
        }

    def observe(self, run: RunRef) -> AllocationExit | None:
        """Return how an allocation ended; None until it has ended on all nodes.

        If a node failed, the allocation is killed on the other nodes. The first failure decides the exit.
        """
        if run.is_on_own_node:
            return self._local.observe(run)
        remotes = self._remote_runs(run)
        ended = sorted(
            (remote for _, remote in remotes if remote.exit is not None), key=lambda remote: remote.heard_s
        )
        first = min(ended, key=_failure_order, default=None)
        if first is not None and _has_not_failed(first):
            first = None
        if len(ended) == len(remotes):
            return _combined_exit(ended, first or ended[-1], self._terminating.get(run.allocation_id))
        if len(remotes) > 1 and run.allocation_id not in self._terminating:
            for on_node, (link, remote) in zip(run.allocated, remotes, strict=True):
                if remote.exit is None and link is not None and (why := link.lost_reason()) is not None:
                    exit_ = NodeExit(on_node.node_id, 137, 9, "unreachable", why)
                    self._terminating.setdefault(run.allocation_id, exit_)
        if first is not None:
            # The ranks on other nodes get time to detect the failure and exit.
            waits = first.exit is not None and first.exit.cause in ("exited", "refused")
            if not waits or time.monotonic() > first.heard_s + _EXIT_GRACE_S:
                self._terminating.setdefault(run.allocation_id, None)
        if run.allocation_id in self._terminating:
            self.kill(run)
        return None

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        if run.is_on_own_node:
            return self._local.outputs(run)
        pairs = zip(run.allocated, self._remote_runs(run), strict=True)
        ordered = sorted(pairs, key=lambda pair: _failure_order(pair[1][1]))
        return tuple(Output(on_node.node_id, self._mirror(run, on_node)) for on_node, _ in ordered)

    def notes(self, run: RunRef) -> Sequence[str]:
        links = [self._link_to(run, on_node) for on_node in run.allocated]
        return [note for link in links if link is not None for note in link.pop_notes(run.allocation_id)]

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        """Return uuids of checkpoints that an allocation began to save and did not report.

        A host's agent reports such checkpoints at the allocation's exit, so checkpoints of a lost host are missing.
        """
        found = {uuid for output in self.outputs(run) for uuid in begun_checkpoints(output.directory)}
        return sorted(found)

    def ask_to_stop(self, run: RunRef) -> None:
        if run.is_on_own_node:
            self._local.ask_to_stop(run)
            return
        for link, _ in self._remote_runs(run):
            if link is not None:
                link.stop(run.allocation_id)

    def kill(self, run: RunRef, *, leaves_record: bool = True) -> None:
        if run.is_on_own_node:
            self._local.kill(run, leaves_record=leaves_record)
            return
        for link, _ in self._remote_runs(run):
            if link is not None:
                link.kill(run.allocation_id, leaves_record=leaves_record)

    def forget(self, run: RunRef) -> None:
        self._terminating.pop(run.allocation_id, None)
        if run.is_on_own_node:
            self._local.forget(run)
            return
        for on_node in run.allocated:
            link = self._link_to(run, on_node)
            if link is not None:
                link.forget(run.allocation_id)
        with contextlib.suppress(OSError):
            remove_tree(run.directory)

    def poll(self, *, is_busy: bool) -> None:
        self._local.poll(is_busy=is_busy)
        self._status.write(
            ShownHost(node.name, len(node.slots), node.why_down, node.since_us) for node in self.nodes()
        )


class HostsBackend(LinkedBackend):
    """Runs allocations with slots on the hosts of a hostfile.

    ``hosts`` maps node ids to hosts. ``notify`` wakes the scheduler; it is called from any thread.
    """

    def __init__(
        self,
        local: LocalBackend,
        hosts: dict[int, Host],
        settings: AgentSettings,
        notify: Callable[[], None],
        state_dir: Path,
    ) -> None:
        super().__init__(local, state_dir)
        self._links = {node_id: HostLink(node_id, host, settings, notify) for node_id, host in hosts.items()}

    def begin(self) -> None:
        for link in self._links.values():
            link.start()
        give_up_at_s = time.monotonic() + _BEGIN_S
        for link in self._links.values():
            link.has_tried.wait(max(give_up_at_s - time.monotonic(), 0))

    def nodes(self) -> tuple[Node, ...]:
        return tuple(link.node() for _, link in sorted(self._links.items()))

    def _link_to(self, run: RunRef, on_node: NodeAllocation) -> HostLink | None:
        del run
        return self._links.get(on_node.node_id)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._local.close()


def _has_not_failed(remote: RemoteRun) -> bool:
    return remote.exit is None or remote.exit.exit_code == 0


def _failure_order(remote: RemoteRun) -> tuple[bool, bool, float]:
    """Return a sort key that puts the node that caused an allocation's failure first."""
    is_preempted = remote.exit is not None and remote.exit.cause == "preempted"
    return _has_not_failed(remote), remote.is_consequence or is_preempted, remote.heard_s


def _ranks_of(run: RunRef, on_node: NodeAllocation) -> str:
    first = sum(len(one.slots) for one in run.allocated[: run.allocated.index(on_node)])
    last = first + len(on_node.slots) - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _combined_exit(
    ended: Sequence[RemoteRun], cause: RemoteRun, terminating: NodeExit | None
) -> AllocationExit:
    """Return the exit of an allocation that has ended on all nodes.

    Args:
        ended: the allocation's state on each node.
        cause: the state on the node that failed first; if none failed, on the node that ended last.
        terminating: exit of the unreachable node because of which the allocation was killed; None if there is none.
    """
    exits = [remote.exit for remote in ended if remote.exit is not None]
    exit_ = terminating or cause.exit or exits[-1]
    return AllocationExit(
        exit_code=exit_.exit_code,
        signal=exit_.signal,
        time_us=cause.time_us if terminating is None and cause.time_us else now_us(),
        explanation=exit_.text,
        was_lost=exit_.cause in ("lost", "unreachable"),
        nodes=tuple(exits),
    )
