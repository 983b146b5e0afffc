"""Jobs and allocations of ``QueuedBackend`` with an in-memory engine."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.errors import DstrialError, MasterError
from dstrial.hosts.transport import Transport
from dstrial.master.backends.backend import (
    AllocationRequest,
    NodeAllocation,
    ResourceRequest,
    RunRef,
    SlotsGoneError,
)
from dstrial.master.backends.engine import (
    EngineJob,
    EngineRefusedError,
    JobRequest,
    JobState,
    NodeCapacity,
    Part,
)
from dstrial.master.backends.fork_servers import ForkServers
from dstrial.master.backends.hosts.link import AgentSettings
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.queued.backend import QueuedBackend
from dstrial.master.scheduler.reconciler import failed_start
from dstrial.master.store.nodes import slot_id_of

pytestmark = pytest.mark.process


@dataclasses.dataclass
class Nodes(Transport):
    """A transport whose command never answers."""

    connect_s: float = 600.0
    other_error = ("not there", "Look for it.")

    def words(self, host: str, python: str) -> list[str]:
        del host, python
        return ["cat"]


@dataclasses.dataclass
class InMemory:
    """An engine with one node; job ``n`` has one slot and the key ``trial-n``."""

    job_ids: tuple[str, ...] = ()
    state: JobState = "running"
    refusal: str | None = None
    accepts: int = 0
    num_polls: int = 0
    asked: list[JobRequest] = dataclasses.field(default_factory=list)
    on_cancel: Callable[[str], None] = lambda _: None
    cancelled: list[str] = dataclasses.field(default_factory=list)
    node_transport: Nodes = dataclasses.field(default_factory=Nodes)
    name: str = "Memory"

    def nodes(self) -> Mapping[str, NodeCapacity]:
        return {"host1": NodeCapacity(4)}

    def job_name(self, job_id: str) -> str:
        return f"job {job_id}"

    def unsatisfiable_reasons(self, request: JobRequest) -> tuple[()]:
        del request
        return ()

    def submit(self, request: JobRequest) -> str:
        self.asked.append(request)
        if request.num_slots > self.accepts:
            raise EngineRefusedError(self.refusal or "none is to be had")
        job_id = request.key.removeprefix("trial-")
        self.job_ids = (*self.job_ids, job_id)
        return job_id

    def max_pending(self, num_slots: int) -> int:
        return num_slots

    def jobs(self) -> Sequence[EngineJob]:
        self.num_polls += 1
        return [
            EngineJob(job_id, f"trial-{job_id}", self.state, f"job {job_id}", (Part("host1", 1),))
            for job_id in self.job_ids
            if job_id not in self.cancelled
        ]

    def cancel(self, job_id: str) -> None:
        self.on_cancel(job_id)
        self.cancelled.append(job_id)

    def transport(self, job_id: str) -> Nodes:
        del job_id
        return self.node_transport

    def close(self) -> None:
        pass


@dataclasses.dataclass
class Made:
    engine: InMemory
    backend: QueuedBackend
    told: threading.Event


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    engine, told = InMemory(), threading.Event()
    servers = ForkServers(tmp_path / "log", is_on=False)
    backend = QueuedBackend(
        LocalBackend("here", (), servers),
        engine,
        AgentSettings("python", "c", 1, None, False, False, 1.0, engine.node_transport),
        lambda names: dict.fromkeys(names, 1),
        told.set,
        tmp_path,
        wants_devices=False,
    )
    yield Made(engine, backend, told)
    backend.close()


def request(key: int, num_slots: int = 1, **values: Any) -> ResourceRequest:
    return ResourceRequest(key, num_slots, False, frozenset(), lambda: (f"trial {key}", {}), **values)


def begin(made: Made, *job_ids: str) -> None:
    """Start the backend and wait until it has seen these jobs of the engine."""
    made.backend.begin()
    made.backend.request([request(int(job_id)) for job_id in job_ids])
    made.engine.job_ids = job_ids
    wait_for(lambda: all(made.backend.job_text(int(job_id)) == f"job {job_id}" for job_id in job_ids))


def submit(made: Made, directory: Path, index: int) -> None:
    """Submit an allocation on one slot of node 1."""
    values: dict[str, Any] = dict.fromkeys(
        (field.name for field in dataclasses.fields(AllocationRequest)), ""
    )
    run = RunRef("2.x.1", directory, (NodeAllocation(1, (slot_id_of(1, index),)),))
    made.backend.submit(
        AllocationRequest(**{**values, "ports": {}, "slots": (), "links": {}, "variables": {}}), run
    )


def test_submit_into_job_about_to_be_cancelled_fails(made: Made, tmp_path: Path) -> None:
    begin(made, "1", "2")
    raised: list[DstrialError] = []

    def begin_in_the_second(job_id: str) -> None:
        if job_id == "1":
            try:
                submit(made, tmp_path / "allocation", 1)
            except DstrialError as error:
                raised.append(error)

    made.engine.on_cancel = begin_in_the_second
    made.engine.state = "leaving"
    wait_for(lambda: made.engine.cancelled == ["1", "2"])
    assert [type(error) for error in raised] == [SlotsGoneError]


def test_job_serves_one_allocation_then_is_cancelled(made: Made, tmp_path: Path) -> None:
    """A trial that restarts gets a new job."""
    begin(made, "1")
    submit(made, tmp_path / "allocation", 0)
    polls = made.engine.num_polls
    wait_for(lambda: made.engine.num_polls > polls + 1)
    assert (made.engine.asked, made.engine.cancelled) == ([], [])
    made.backend.request([])
    run = RunRef("2.x.1", tmp_path / "allocation", (NodeAllocation(1, (slot_id_of(1, 0),)),))
    made.backend.forget(run)
    made.backend.request([request(1)])
    wait_for(lambda: set(made.engine.cancelled) == {"1"})
    wait_for(lambda: [one.key for one in made.engine.asked] == ["trial-1"])


def test_backend_close_keeps_job_in_use(made: Made, tmp_path: Path) -> None:
    begin(made, "1", "2")
    submit(made, tmp_path / "allocation", 1)
    made.engine.state = "leaving"
    wait_for(lambda: made.engine.cancelled)
    made.backend.close()
    assert set(made.engine.cancelled) == {"1"}


def test_submit_into_ended_job_counts_no_restart(made: Made, tmp_path: Path) -> None:
    begin(made, "1")
    made.engine.job_ids = ()
    wait_for(lambda: made.backend.job_text(1) != "job 1")
    with pytest.raises(SlotsGoneError, match="ended before the allocation started") as raised:
        submit(made, tmp_path / "allocation", 0)
    exit_ = failed_start(raised.value)
    assert exit_.was_lost, "it counts as no restart"
    assert not failed_start(MasterError("no such entrypoint")).was_lost


def test_job_ended_while_master_down_loses_allocation(made: Made, tmp_path: Path) -> None:
    directory = tmp_path / "allocation"
    directory.mkdir()
    (directory / "job.json").write_text('{"job": "1"}')
    run = RunRef("2.x.1", directory, (NodeAllocation(1, (slot_id_of(1, 0),)),))
    assert made.backend.find(run) is None
    assert made.backend.observe(run) is None, "the engine has not been asked"
    made.backend.begin()
    wait_for(lambda: made.backend.observe(run) is not None)
    exit_ = made.backend.observe(run)
    assert exit_ is not None
    assert (exit_.was_lost, exit_.explanation) == (True, "job 1 has ended")


def test_unrequested_job_is_cancelled_after_first_request(made: Made) -> None:
    """Jobs of an earlier master stay until the scheduler has requested slots."""
    made.engine.job_ids, made.engine.state = ("1", "2"), "pending"
    made.backend.begin()
    wait_for(lambda: made.backend.job_text(2) == "job 2")
    assert made.engine.cancelled == []
    made.backend.request([request(2)])
    wait_for(lambda: set(made.engine.cancelled) == {"1"})
    assert made.backend.job_text(2) == "job 2"


def test_three_early_job_ends_fail_request(made: Made) -> None:
    made.engine.accepts, made.engine.state = 1, "ended"
    made.backend.begin()
    refused: dict[int | str, str] = {}

    def is_refused() -> bool:
        refused.update(made.backend.request([request(7)]).refused)
        return bool(refused)

    wait_for(is_refused)
    assert refused == {7: "3 jobs in a row failed before it began; the last one: job 7"}
    assert len(made.engine.asked) >= 3


def test_rejected_request_waits_with_reason(made: Made) -> None:
    made.engine.refusal = "two jobs wait already"
    begin(made)
    made.backend.request([request(7)])
    expected = "Memory rejects its job; retrying: two jobs wait already"
    wait_for(lambda: made.backend.job_text(7) == expected)
    assert made.backend.request([request(7)]).refused == {}


def test_rejected_request_falls_back_to_fewer_slots(made: Made) -> None:
    made.engine.accepts, made.engine.state = 2, "pending"
    begin(made)
    made.backend.request([request(7, 4, fewer=(3, 2, 1))])
    wait_for(lambda: made.backend.job_text(7) == "job 7")
    assert [one.num_slots for one in made.engine.asked] == [4, 3, 2]
