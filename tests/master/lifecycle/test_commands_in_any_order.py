"""State changes of commands: pause, kill and exit in any order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrial.config.experiment_config.command import CommandKind, check_command
from dstrial.master.backends.backend import AllocationExit, SupervisorHandle
from dstrial.master.clock import now_us
from dstrial.master.lifecycle import commands as life
from dstrial.master.store import allocations, commands, users
from dstrial.master.store.commands import NewCommand
from dstrial.master.store.database import Database
from dstrial.master.store.errors import InvalidError
from dstrial.master.store.reports import logs

NUM_SLOTS = 2


class Store:
    """A database with users, and helpers that change commands in it."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def create(
        self, kind: CommandKind = "GENERIC", *, config: dict[str, Any] | None = None, **fields: Any
    ) -> str:
        given = {"entrypoint": ["true"], **(config or {})}
        spec = check_command(given, kind, num_slots=NUM_SLOTS)
        new = NewCommand(kind, spec, 1, 1, b"files", **{"is_pausable": kind == "GENERIC", **fields})
        return self.database.write(lambda tx: life.create(tx, new))

    def assign(self, task_id: str) -> str:
        row = self.database.write(
            lambda tx: life.assign(
                tx, task_id, slots=[0], ports={}, resources_id="r", directory="/d", token_hashes={}
            )
        )
        assert row is not None
        return str(row.id)

    def do(self, function: Any, *arguments: Any, **options: Any) -> Any:
        return self.database.write(lambda tx: function(tx, *arguments, **options))

    def end(self, allocation_id: str, code: int = 0, *, was_lost: bool = False) -> None:
        exit_ = AllocationExit(code, None, now_us(), None, was_lost)
        self.do(life.exited, allocation_id, exit_)

    def row(self, task_id: str) -> commands.CommandInfo:
        with self.database.read() as connection:
            return commands.require(connection, task_id)

    def state(self, task_id: str) -> str:
        return str(self.row(task_id).state)

    def text(self, task_id: str) -> str:
        with self.database.read() as connection:
            return "".join(row.log for row in logs.query(connection, logs.LogFilter(task_id=task_id)))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    database = Database(tmp_path / "master.db")
    database.write(lambda tx: users.create_first_users(tx, {"determined": "", "admin": ""}))
    yield Store(database)
    database.close()


@pytest.mark.parametrize(
    ("code", "was_lost", "state", "status"),
    [
        (0, False, "COMPLETED", "exited with code 0"),
        (3, False, "ERROR", "exited with code 3"),
        (137, True, "ERROR", "allocation lost: its supervisor was killed"),
    ],
)
def test_process_exit_ends_command(store: Store, code: int, was_lost: bool, state: str, status: str) -> None:
    task_id = store.create("COMMAND")
    allocation_id = store.assign(task_id)
    store.do(life.started, allocation_id, SupervisorHandle(1, "0"))
    store.end(allocation_id, code, was_lost=was_lost)

    assert (store.state(task_id), store.row(task_id).exit_status) == (state, status)
    with store.database.read() as connection:
        assert connection.execute("SELECT end_us FROM tasks WHERE id = ?", (task_id,)).fetchone()[0] > 0
        assert commands.context(connection, task_id) is None


def test_waiting_task_is_paused_and_killed_immediately(store: Store) -> None:
    task_id = store.create()
    store.do(life.pause, task_id)
    assert store.state(task_id) == "PAUSED"
    store.do(life.unpause, task_id)
    assert store.state(task_id) == "ACTIVE"
    store.do(life.kill, task_id)

    assert store.state(task_id) == "CANCELED"
    with store.database.read() as connection:
        assert commands.waiting(connection) == []
        assert commands.context(connection, task_id) == b"files"
    for verb in (life.pause, life.unpause):
        with pytest.raises(InvalidError, match="is CANCELED; expected one that has not ended"):
            store.do(verb, task_id)


def test_task_unpaused_while_stopping_starts_again(store: Store) -> None:
    task_id = store.create()
    allocation_id = store.assign(task_id)
    store.do(life.pause, task_id)
    assert store.state(task_id) == "STOPPING_PAUSED"
    store.do(life.unpause, task_id)
    store.end(allocation_id, 143)

    assert store.state(task_id) == "ACTIVE"
    assert store.assign(task_id) == f"{task_id}.2"


def test_kill_overrides_pause(store: Store) -> None:
    task_id = store.create()
    allocation_id = store.assign(task_id)
    store.do(life.pause, task_id)
    store.do(life.kill, task_id)
    with store.database.read() as connection:
        assert allocations.require(connection, allocation_id).kill_us is not None
    store.end(allocation_id, 137)

    assert (store.state(task_id), store.row(task_id).exit_status) == (
        "CANCELED",
        "allocation killed: a user has killed it",
    )


def test_release_requeues_only_pausable_tasks(store: Store) -> None:
    task_id, command = store.create(), store.create("COMMAND")
    for one in (task_id, command):
        allocation_id = store.assign(one)
        with store.database.read() as connection:
            row = allocations.require(connection, allocation_id)
        store.do(life.release, row, "slot 0 was disabled", is_kill=True)
        store.end(allocation_id, 137)

    assert (store.state(task_id), store.state(command)) == ("ACTIVE", "CANCELED")
    assert store.row(command).exit_status == "allocation killed: slot 0 was disabled"


def test_tree_and_root_find_related_tasks(store: Store) -> None:
    first = store.create()
    second = store.create(parent_id=first)
    third, other = store.create(parent_id=second), store.create()
    with store.database.read() as connection:
        assert set(commands.tree(connection, first)) == {first, second, third}
        assert commands.tree(connection, other) == [other]
        assert [commands.root(connection, one) for one in (first, third, other)] == [first, first, other]


@pytest.mark.parametrize("stop", [life.kill, life.pause])
def test_stopped_task_cannot_create_children(store: Store, stop: Any) -> None:
    parent = store.create()
    allocation_id = store.assign(parent)
    child = store.create(parent_id=parent)
    store.do(stop, parent)
    state = store.state(parent)
    with pytest.raises(InvalidError, match=f"is {state}; expected one that nobody is stopping"):
        store.create(parent_id=parent)
    store.end(allocation_id, 143)

    if stop is life.kill:
        with pytest.raises(InvalidError, match="is CANCELED; expected one that nobody is stopping"):
            store.create(parent_id=parent)
    with store.database.read() as connection:
        assert set(commands.tree(connection, parent)) == {parent, child}
    assert store.state(store.create(forked_from=parent)) == "ACTIVE"


def test_completed_task_can_be_parent(store: Store) -> None:
    parent = store.create()
    store.end(store.assign(parent))

    assert store.state(store.create(parent_id=parent)) == "ACTIVE"


def test_unstarted_process_is_retried(store: Store) -> None:
    task_id = store.create()
    store.end(store.assign(task_id), 137, was_lost=True)

    assert store.state(task_id) == "ACTIVE"
    assert "the master was killed before the process began" in store.text(task_id)
    assert "has failed" not in store.text(task_id)


def test_started_or_killed_process_is_not_retried(store: Store) -> None:
    began, killed = store.create("COMMAND"), store.create("COMMAND")
    allocation_id = store.assign(began)
    store.do(life.started, allocation_id, SupervisorHandle(1, "0"))
    store.end(allocation_id, 137, was_lost=True)
    allocation_id = store.assign(killed)
    store.do(life.kill, killed)
    store.end(allocation_id, 137, was_lost=True)

    assert (store.state(began), store.state(killed)) == ("ERROR", "CANCELED")


def test_ineffective_config_key_is_logged(store: Store) -> None:
    mount = {"host_path": "/a", "container_path": "/b"}
    task_id = store.create(config={"bind_mounts": [mount]})

    assert "bind_mounts has no effect" in store.text(task_id)


def test_forget_old_deletes_command_logs_by_age(store: Store) -> None:
    old, new, living = (store.create() for _ in range(3))
    for one in (old, new):
        store.end(store.assign(one))
    store.database.write(
        lambda tx: tx.execute(
            "UPDATE commands SET end_us = end_us - ? WHERE task_id = ?", (3 * 86400 * 10**6, old)
        )
    )
    assert store.do(logs.forget_old, None) == 0
    assert store.do(logs.forget_old, 3650) == 0
    with store.database.read() as connection:
        assert commands.context(connection, old) == b"files"
    assert store.do(logs.forget_old, 2) > 0

    assert (store.text(old), "resources exited successfully" in store.text(new)) == ("", True)
    with store.database.read() as connection:
        assert [commands.context(connection, one) for one in (old, new, living)] == [None, b"files", b"files"]
