"""Scheduler errors are retried, shown by /health, and stop no other trial."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import yaml
from serving import Master
from submitting import config
from waiting import wait_for

from dstrial.master.backends.backend import AllocationExit, RunRef
from dstrial.master.backends.local import LocalBackend
from dstrial.master.scheduler.backoff import Backoff
from dstrial.master.scheduler.reconciler import Reconciler
from dstrial.master.scheduler.scheduler import Scheduler
from dstrial.master.services import Services
from dstrial.master.store import allocations as allocation_rows
from dstrial.master.store.database import Connection, Transaction

pytestmark = pytest.mark.process
T = TypeVar("T")


@contextlib.contextmanager
def scheduling(master: Master) -> Iterator[Scheduler]:
    """End the trials of the store, then run a scheduler with short retry delays."""
    services = master.services
    master.change("UPDATE allocations SET state = 'TERMINATED' WHERE experiment_id <= 2")
    master.change("UPDATE trials SET state = 'CANCELED' WHERE experiment_id <= 2")
    scheduler = Scheduler(services, Backoff(first_s=0.05, longest_s=0.5))
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop(graceful=False, timeout_s=0)


def submit(master: Master, entrypoint: str, **changes: Any) -> int:
    """Submit an experiment with one trial and return the trial's id."""
    script = {
        "path": "a.py",
        "type": 48,
        "content": base64.b64encode(b"").decode(),
        "mtime": "0",
        "mode": 420,
    }
    body = {
        "activate": True,
        "config": yaml.safe_dump(config(entrypoint, **changes)),
        "modelDefinition": [script],
    }
    created = master.send("POST", "/api/v1/experiments", body, token="determined")
    assert created.status == 200, created.content
    experiment_id = created.json["experiment"]["id"]
    [row] = master.rows("SELECT id FROM trials WHERE experiment_id = ?", experiment_id)
    return int(row["id"])


def state_of(master: Master, trial_id: int) -> str:
    return str(master.rows("SELECT state FROM trials WHERE id = ?", trial_id)[0]["state"])


def log_of(master: Master, trial_id: int) -> str:
    rows = master.rows("SELECT log FROM logs WHERE trial_id = ? ORDER BY id", trial_id)
    return "".join(row["log"] for row in rows)


def use_backend(services: Services, kind: type[LocalBackend]) -> None:
    """Replace the master's backend with an instance of a subclass."""
    own = services.backend
    assert isinstance(own, LocalBackend)
    services.backend = kind("test", services.own_slots, own._fork_servers, is_warm=False)


class Unready(LocalBackend):
    """A backend whose ``begin()`` fails until ``is_ready`` is set."""

    is_ready = threading.Event()

    def begin(self) -> None:
        if not self.is_ready.is_set():
            raise RuntimeError("can't start new thread")


def test_backend_begin_failure_is_retried_and_shown(fresh_master: Master) -> None:
    services = fresh_master.services
    use_backend(services, Unready)
    with scheduling(fresh_master):
        wait_for(lambda: fresh_master.get("/health", None).status == 503, deadline_s=20)
        assert "can't start new thread" in fresh_master.get("/health", None).error
        trial_id = submit(fresh_master, "true")

        Unready.is_ready.set()

        wait_for(lambda: state_of(fresh_master, trial_id) == "COMPLETED")
        assert fresh_master.get("/health", None).status == 200


class Blind(LocalBackend):
    """A backend that fails to poll allocations with a file ``workdir/blind``."""

    def observe(self, run: RunRef) -> AllocationExit | None:
        if (run.directory / "workdir" / "blind").exists():
            raise LookupError("no such field")
        return super().observe(run)


def test_allocation_poll_failure_delays_no_other(fresh_master: Master) -> None:
    use_backend(fresh_master.services, Blind)
    with scheduling(fresh_master):
        blind = submit(fresh_master, "touch blind; sleep 1; rm blind")
        other = submit(fresh_master, "true")

        wait_for(lambda: state_of(fresh_master, other) == "COMPLETED")
        wait_for(lambda: state_of(fresh_master, blind) == "COMPLETED")


def test_scheduler_never_writes_inside_snapshot(fresh_master: Master) -> None:
    """A snapshot that waits for a write blocks the checkpoint of SQLite's WAL."""
    database = fresh_master.services.database
    reading, inside = threading.local(), []
    read, submit_ = database.read, database.submit

    @contextlib.contextmanager
    def watched_read() -> Iterator[Connection]:
        reading.depth = getattr(reading, "depth", 0) + 1
        try:
            with read() as connection:
                yield connection
        finally:
            reading.depth -= 1

    def watched_submit(function: Callable[[Transaction], T]) -> Any:
        if getattr(reading, "depth", 0):
            inside.append(function)
        return submit_(function)

    database.read, database.submit = watched_read, watched_submit  # type: ignore[method-assign]
    large = submit(fresh_master, "true")
    fresh_master.change("UPDATE experiments SET slots_per_trial = 99 WHERE id = 3")
    with scheduling(fresh_master):
        small = submit(fresh_master, "true")

        wait_for(lambda: state_of(fresh_master, small) == "COMPLETED")
        wait_for(lambda: "the trial needs 99 slots and waits" in log_of(fresh_master, large))

    assert inside == []


def test_unschedulable_trial_waits_alone(fresh_master: Master) -> None:
    fresh_master.change("UPDATE experiments SET state = 'PAUSED' WHERE id <= 2")
    broken = submit(fresh_master, "python3 -m dstrial.launch a.py")
    fresh_master.change("UPDATE experiments SET slots_per_trial = 99 WHERE id = 3")
    [row] = fresh_master.rows("SELECT task_id FROM trials WHERE id = ?", broken)
    fresh_master.change(
        "INSERT INTO checkpoints (uuid, experiment_id, trial_id, task_id, run_id, state, steps, resources, metadata, size, "
        "report_us) VALUES ('c', 3, ?, ?, 1, 'COMPLETED', 3, '{}', 'no JSON', 1, 1)",
        broken,
        row["task_id"],
    )
    with scheduling(fresh_master):
        other = submit(fresh_master, "true")

        wait_for(lambda: state_of(fresh_master, other) == "COMPLETED")

    assert state_of(fresh_master, broken) == "ACTIVE"
    assert "the master could not schedule it (JSONDecodeError:" in log_of(fresh_master, broken)


class Failing(LocalBackend):
    def observe(self, run: RunRef) -> AllocationExit | None:
        raise LookupError(run.allocation_id)


def test_reconciler_sleeps_while_allocation_is_postponed(fresh_master: Master) -> None:
    services = fresh_master.services
    use_backend(services, Failing)
    with services.database.read() as connection:
        [row] = allocation_rows.all_live(connection)[:1]
    reconciler = Reconciler(services, Backoff(first_s=60))

    reconciler.poll([row], is_due=True)
    time.sleep(0.6)  # the longest poll interval

    assert reconciler.poll([row], is_due=False) > 30
