"""Jobs of an engine that end while something is about to begin in them; the engine is one in memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from dstrial.errors import DstrialError, MasterError
from dstrial.hosts.transport import Refusal
from dstrial.master.backends.backend import RunRef, Share, SlotsGoneError, Wish
from dstrial.master.backends.engine import (
    EngineJob,
    EngineNotNowError,
    EngineRefusedError,
    JobRequest,
    JobState,
    Part,
)
from dstrial.master.backends.fork_servers import ForkServers, ForkSettings
from dstrial.master.backends.hosts.link import AgentSettings
from dstrial.master.backends.local import LocalBackend
from dstrial.master.backends.queued.backend import QueuedBackend
from dstrial.master.backends.request import AllocationRequest
from dstrial.master.scheduler.reconciler import failed_start
from dstrial.master.store.nodes import slot_id_of

pytestmark = pytest.mark.process


class NoWay:
    """Reaches no node."""

    connect_s = 1.0

    def words(self, host: str, python: str) -> list[str]:
        del host, python
        return ["false"]

    def environment(self) -> None:
        pass

    def refusal(self, host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
        del host, python, exit_code, errors
        return Refusal("not there", "Look for it.")


@dataclasses.dataclass
class InMemory:
    """An engine with one node of four slots."""

    job_ids: tuple[str, ...] = ()
    state: JobState = "running"
    refusal: str | None = None
    is_full: bool = False
    num_asked: int = 0
    on_cancel: Callable[[str], None] = lambda _: None
    cancelled: list[str] = dataclasses.field(default_factory=list)
    name: str = "Memory"

    def capacity(self) -> Mapping[str, int]:
        return {"host1": 4}

    def down(self) -> Mapping[str, int]:
        return {}

    def spare(self) -> Mapping[str, int]:
        return {}

    def called(self, job_id: str) -> str:
        return f"job {job_id}"

    def why_never(self, request: JobRequest) -> tuple[()]:
        del request
        return ()

    def submit(self, request: JobRequest) -> str:
        del request
        self.num_asked += 1
        if self.is_full:
            raise EngineNotNowError("two jobs wait already")
        raise EngineRefusedError(self.refusal or "none is to be had")

    def most_pending(self, num_slots: int) -> int:
        return num_slots

    def jobs(self) -> Sequence[EngineJob]:
        return [
            EngineJob(job_id, f"trial-{job_id}", self.state, f"job {job_id}", (Part("host1", 1),))
            for job_id in self.job_ids
            if job_id not in self.cancelled
        ]

    def cancel(self, job_id: str) -> None:
        self.on_cancel(job_id)
        self.cancelled.append(job_id)

    def transport(self, job_id: str) -> NoWay:
        del job_id
        return NoWay()

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
    servers = ForkServers(ForkSettings(is_on=False, idle_timeout_s=1.0), tmp_path / "log")
    settings = AgentSettings("python", "c", 1, None, False, False, 1.0, NoWay())
    backend = QueuedBackend(
        LocalBackend("here", (), servers),
        engine,
        settings,
        lambda names: dict.fromkeys(names, 1),
        told.set,
        tmp_path,
        wants_devices=False,
        section="memory",
        shown_hosts_name="hosts.json",
    )
    yield Made(engine, backend, told)
    backend.close()


def begin(made: Made, *job_ids: str) -> None:
    """Look at the engine, which has these jobs, each with a slot for its trial."""
    made.engine.job_ids = job_ids
    made.backend.request((), [int(job_id) for job_id in job_ids])
    made.backend.begin()
    wait_for(lambda: all(made.backend.lent(int(job_id)).num_slots == 1 for job_id in job_ids))


def submit(made: Made, directory: Path, index: int) -> None:
    """Begin an allocation in the job that has a slot of the node."""
    request: dict[str, Any] = dict.fromkeys(
        (field.name for field in dataclasses.fields(AllocationRequest)), ""
    )
    run = RunRef("2.x.1", directory, (Share(1, (slot_id_of(1, index),)),))
    made.backend.submit(AllocationRequest(**{**request, "ports": {}, "slots": ()}), run)


def test_nothing_begins_in_a_job_that_is_about_to_be_given_back(made: Made, tmp_path: Path) -> None:
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


def test_a_job_in_which_something_runs_is_not_given_back(made: Made, tmp_path: Path) -> None:
    begin(made, "1", "2")
    submit(made, tmp_path / "allocation", 1)
    made.engine.state = "leaving"
    wait_for(lambda: made.engine.cancelled)
    made.backend.close()
    assert made.engine.cancelled == ["1"]


def test_a_job_that_has_ended_before_something_begins_in_it_is_a_loss(made: Made, tmp_path: Path) -> None:
    begin(made, "1")
    made.engine.job_ids = ()
    wait_for(lambda: made.backend.lent(1).num_slots == 0)
    with pytest.raises(SlotsGoneError, match="has ended before it began there") as raised:
        submit(made, tmp_path / "allocation", 0)
    exit_ = failed_start(raised.value)
    assert exit_.was_lost, "it counts as no restart"
    assert not failed_start(MasterError("no such entrypoint")).was_lost


def test_a_refusal_that_nobody_has_heard_ends_nobody_later(made: Made) -> None:
    wish = Wish(7, 1, False, frozenset(), lambda: ("a trial", {}))
    begin(made)
    made.told.clear()
    made.backend.request([wish], [])
    wait_for(lambda: made.engine.num_asked)
    assert made.told.wait(30)
    made.backend.request((), [])  # It is paused.
    assert made.backend.request([wish], []).refused == {}
    made.told.clear()
    assert made.told.wait(30)
    assert made.backend.request([wish], []).refused == {7: "none is to be had"}


def test_who_is_refused_for_those_who_wait_already_waits_too(made: Made) -> None:
    wish = Wish(7, 1, False, frozenset(), lambda: ("a trial", {}))
    made.engine.is_full = True
    begin(made)
    made.backend.request([wish], [])
    wait_for(lambda: made.backend.job_text(7).endswith("is asked again: two jobs wait already"))
    assert made.backend.request([wish], []).refused == {}


def test_who_needs_a_node_that_is_switched_off_waits_and_asks_again_when_it_is_on(made: Made) -> None:
    wish = Wish(7, 1, False, frozenset({1}), lambda: ("a trial", {}), off=frozenset({1}))
    begin(made)
    made.backend.request([wish], [])
    wait_for(lambda: "now without host1, which is switched off, and is asked" in made.backend.job_text(7))
    assert made.backend.request([wish], []).refused == {}
    asked = made.engine.num_asked
    made.told.clear()
    made.backend.request([dataclasses.replace(wish, kept_off=frozenset(), off=frozenset())], [])
    wait_for(lambda: made.engine.num_asked > asked)
    wait_for(lambda: made.backend.request([wish], []).refused == {7: "none is to be had"})
