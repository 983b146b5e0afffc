"""Runs what has slots on hosts of a hostfile, and the rest on this machine."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dstrial.errors import MasterError
from dstrial.file_writes import remove_tree, replace_file
from dstrial.hosts.hostfile import Host
from dstrial.master.backends.backend import (
    AllocationExit,
    Node,
    NodeExit,
    Note,
    Output,
    OwnNodes,
    RunRef,
    Share,
    SupervisorHandle,
)
from dstrial.master.backends.hosts.link import AgentSettings, HostLink, RemoteRun, new_run
from dstrial.master.backends.local import LocalBackend, begun_checkpoints
from dstrial.master.backends.request import AllocationRequest

SHOWN_NAME = "hosts.json"  # file of the state directory that `shown_hosts` reads
_BEGIN_S = 8.0
_ENDS_BY_ITSELF_S = 5.0  # grace period of the other nodes after one has failed


@dataclasses.dataclass(frozen=True, slots=True)
class ShownHost:
    """A host in ``dstrial status``; ``why_down`` is None while it can be used."""

    name: str
    num_slots: int
    why_down: str | None
    since_us: int


def shown_hosts(state_dir: Path) -> list[ShownHost]:
    """Return the hosts of a state directory's master; empty without one."""
    try:
        found = json.loads((state_dir / SHOWN_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [ShownHost(**one) for one in found]


class LinkedBackend(abc.ABC):
    """Runs what has slots on machines with links, and the rest on the master's own.

    ``shown_in`` is the file that ``shown_hosts`` reads.
    """

    def __init__(self, local: LocalBackend, shown_in: Path) -> None:
        self._local = local
        self._shown_in = shown_in
        self._shown: list[ShownHost] = []
        shown_in.unlink(missing_ok=True)  # of a master before this one
        # Allocations that end because of a node's failure, and that failure where the node cannot tell itself.
        self._terminating: dict[str, NodeExit | None] = {}

    @abc.abstractmethod
    def nodes(self) -> tuple[Node, ...]: ...

    @abc.abstractmethod
    def _link_to(self, run: RunRef, share: Share) -> HostLink | None:
        """Return the link to a share's machine; None if it is gone."""

    def _why_unlinked(self, run: RunRef, share: Share) -> str:
        del run
        return (
            f"node {share.node_id} is no host of the master's any more; expected one of its hostfile. Start the master "
            "with the hostfile that it had."
        )

    def submit(self, request: AllocationRequest, run: RunRef) -> SupervisorHandle | None:
        if run.is_on_own_node:
            return self._local.submit(request, run)
        links = [self._require_link(run, share) for share in run.shares]
        run.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        ports = links[0].take_ports() or request.ports
        nodes = [link.node() for link in links]
        addresses = tuple(node.address for node in nodes) if len(nodes) > 1 else ("127.0.0.1",)
        for rank, (share, link) in enumerate(zip(run.shares, links, strict=True)):
            part = dataclasses.replace(
                request,
                slots=(),
                ports=ports,
                addresses=addresses,
                node_rank=rank,
                slot_counts=tuple(len(one.slots) for one in run.shares),
            )
            link.submit(run.allocation_id, self._new_part(run, share, link, part))
        return None

    def _require_link(self, run: RunRef, share: Share) -> HostLink:
        link = self._link_to(run, share)
        if link is None:
            raise MasterError(self._why_unlinked(run, share))
        return link

    def _new_part(
        self, run: RunRef, share: Share, link: HostLink, request: AllocationRequest | None
    ) -> RemoteRun:
        return new_run(self._mirror(run, share), request, link.numbers_of(share.slots), _ranks_of(run, share))

    def _mirror(self, run: RunRef, share: Share) -> Path:
        # What shows an allocation's state looks into its directory: that is the first node's.
        return run.directory if share == run.shares[0] else run.directory / f"node-{share.node_id}"

    def _parts(self, run: RunRef) -> list[tuple[Share, HostLink | None, RemoteRun | None]]:
        """Return each share with its link and state; recover what another master has sent."""
        found: list[tuple[Share, HostLink | None, RemoteRun | None]] = []
        for share in run.shares:
            link = self._link_to(run, share)
            part = None if link is None else link.run(run.allocation_id)
            if link is not None and part is None:
                link.recover(run.allocation_id, self._new_part(run, share, link, None))
                part = link.run(run.allocation_id)
            found.append((share, link, part))
        return found

    def find(self, run: RunRef) -> SupervisorHandle | None:
        if run.is_on_own_node:
            return self._local.find(run)
        part = self._parts(run)[0][2]
        return None if part is None else part.handle

    def supervisors(self, run: RunRef) -> Mapping[int, SupervisorHandle]:
        if run.is_on_own_node:
            return self._local.supervisors(run)
        return {
            share.node_id: part.handle
            for share, _, part in self._parts(run)
            if part is not None and part.handle is not None
        }

    def observe(self, run: RunRef) -> AllocationExit | None:
        """The first failure decides how it ended; the other parts end with it."""
        if run.is_on_own_node:
            return self._local.observe(run)
        parts = self._parts(run)
        exits: list[tuple[float, NodeExit, RemoteRun | None]] = []
        is_failing = run.allocation_id in self._terminating
        for share, link, part in parts:
            if link is None:
                gone = self._why_unlinked(run, share)
                exits.append((0.0, NodeExit(share.node_id, 137, 9, "lost", gone), None))
            elif part is not None and part.exit is not None:
                exits.append((part.heard_s, part.exit, part))
            elif len(parts) > 1 and not is_failing:
                why = link.why_lost()
                if why is not None:
                    is_failing = True
                    self._terminating[run.allocation_id] = NodeExit(share.node_id, 137, 9, "unreachable", why)
        exits.sort(key=lambda one: one[0])
        failed = [one for one in exits if one[1].exit_code != 0]
        # What was ended because of another's failure is no cause, though it may be heard of first.
        failed.sort(key=lambda one: _is_consequence(one[1], one[2]))
        first = failed[0] if failed else None
        if len(exits) == len(parts):
            doom = self._terminating.get(run.allocation_id)
            return _whole(exits, first if doom is None else (0.0, doom, None))
        waits = first is not None and first[1].cause in ("exited", "refused")
        if first is not None and (not waits or time.monotonic() > first[0] + _ENDS_BY_ITSELF_S):
            is_failing = True
        if is_failing:
            self._terminating.setdefault(run.allocation_id, None)
            self.kill(run)
        return None

    def stopped_supervisor(self, run: RunRef) -> int | None:
        return self._local.stopped_supervisor(run) if run.is_on_own_node else None

    def outputs(self, run: RunRef) -> tuple[Output, ...]:
        if run.is_on_own_node:
            return self._local.outputs(run)
        parts = self._parts(run)

        def order(one: tuple[Share, HostLink | None, RemoteRun | None]) -> tuple[bool, bool, float]:
            part = one[2]
            if part is None or part.exit is None or part.exit.exit_code == 0:
                return True, True, 0.0
            return False, _is_consequence(part.exit, part), part.heard_s

        return tuple(
            Output(share.node_id, self._mirror(run, share)) for share, _, _ in sorted(parts, key=order)
        )

    def notes(self, run: RunRef) -> Sequence[Note]:
        links = [self._link_to(run, share) for share in run.shares]
        return [note for link in links if link is not None for note in link.take_notes(run.allocation_id)]

    def begun_checkpoints(self, run: RunRef) -> list[str]:
        """Those on a lost host are unknown."""
        found = {uuid for output in self.outputs(run) for uuid in begun_checkpoints(output.directory)}
        return sorted(found)

    def ask_to_stop(self, run: RunRef) -> None:
        if run.is_on_own_node:
            self._local.ask_to_stop(run)
            return
        for _, link, _ in self._parts(run):
            if link is not None:
                link.stop(run.allocation_id)

    def kill(self, run: RunRef, *, leaves_record: bool = True) -> None:
        if run.is_on_own_node:
            self._local.kill(run, leaves_record=leaves_record)
            return
        for _, link, _ in self._parts(run):
            if link is not None:
                link.kill(run.allocation_id, leaves_record=leaves_record)

    def resident_bytes(self, run: RunRef) -> int:
        return self._local.resident_bytes(run) if run.is_on_own_node else 0

    def forget(self, run: RunRef) -> None:
        self._terminating.pop(run.allocation_id, None)
        if run.is_on_own_node:
            self._local.forget(run)
            return
        for share in run.shares:
            link = self._link_to(run, share)
            if link is not None:
                link.forget(run.allocation_id)
        with contextlib.suppress(OSError):
            remove_tree(run.directory)

    def look(self, *, is_busy: bool) -> None:
        self._local.look(is_busy=is_busy)
        shown = [ShownHost(node.name, len(node.slots), node.why_down, node.since_us) for node in self.nodes()]
        if shown != self._shown:
            self._shown = shown
            text = json.dumps([dataclasses.asdict(one) for one in shown])
            with contextlib.suppress(OSError):  # The next change shows it.
                replace_file(self._shown_in, text, sync=False, is_private=True)


class HostsBackend(OwnNodes, LinkedBackend):
    """Runs what has slots on hosts that belong to the master for good.

    ``tell`` wakes the scheduler; any thread calls it.
    """

    def __init__(
        self,
        local: LocalBackend,
        hosts: dict[int, Host],
        settings: AgentSettings,
        tell: Callable[[], None],
        shown_in: Path,
    ) -> None:
        super().__init__(local, shown_in)
        self._links = {node_id: HostLink(node_id, host, settings, tell) for node_id, host in hosts.items()}

    def begin(self) -> None:
        for link in self._links.values():
            link.start()
        give_up_at_s = time.monotonic() + _BEGIN_S
        for link in self._links.values():
            link.has_tried.wait(max(give_up_at_s - time.monotonic(), 0))

    def nodes(self) -> tuple[Node, ...]:
        return tuple(link.node() for _, link in sorted(self._links.items()))

    def _link_to(self, run: RunRef, share: Share) -> HostLink | None:
        del run
        return self._links.get(share.node_id)

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._local.close()


def _is_consequence(exit_: NodeExit, part: RemoteRun | None) -> bool:
    """Return whether a part failed because another had; it may be heard of first."""
    return exit_.cause == "preempted" or (part is not None and part.is_consequence)


def _ranks_of(run: RunRef, share: Share) -> str:
    """Return a share's ranks for people, one for each slot."""
    first = sum(len(one.slots) for one in run.shares[: run.shares.index(share)])
    last = first + len(share.slots) - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _whole(
    exits: Sequence[tuple[float, NodeExit, RemoteRun | None]],
    first: tuple[float, NodeExit, RemoteRun | None] | None,
) -> AllocationExit:
    """Return the exit of an allocation whose parts have ended, by the first failure."""
    _, exit_, part = first if first is not None else exits[-1]
    was_lost = exit_.cause in ("lost", "unreachable")
    return AllocationExit(
        exit_code=exit_.exit_code,
        signal=exit_.signal,
        time_us=part.time_us if part is not None and part.time_us else time.time_ns() // 1000,
        explanation=exit_.text,
        was_lost=was_lost,
        nodes=tuple(one for _, one, _ in exits),
    )
