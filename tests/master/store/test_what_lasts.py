"""What decides who may do what is on the disk before anybody is told of it, as a client does not say it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstrial.master.store import tokens, users
from dstrial.master.store.database import Database, Transaction, make_cluster_id
from dstrial.master.store.file import marks


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """One with users 1 and 2, and access token 1 of user 2."""
    with contextlib.closing(Database(tmp_path / "master.db")) as made:
        made.write(make_cluster_id)
        made.write(lambda tx: users.create_user(tx, username="one", admin=True, password="a"))
        made.write(lambda tx: users.create_user(tx, username="two", admin=False, password="b"))
        made.write(lambda tx: tokens.create_access_token(tx, 2, "", None))
        yield made


def is_on_the_disk(database: Database) -> bool:
    found = marks.read(marks.path_of(database.path))
    assert found is not None
    assert found.num_frames
    return found.num_synced == found.num_frames


def log_in(tx: Transaction) -> str:
    return tokens.create_token(tx, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda tx: users.create_user(tx, username="three", admin=False, password="c"),
        lambda tx: users.change_user(tx, 2, active=False),
        lambda tx: users.change_user(tx, 2, password="d"),
        lambda tx: tokens.create_access_token(tx, 2, "another", None),
        lambda tx: tokens.change_access_token(tx, 1, None, is_revoked=True),
        lambda tx: tokens.end_user_tokens(tx, 2),
        lambda tx: tokens.end_token(tx, tokens.hash_token("a token")),
    ],
    ids=["a new user", "no longer active", "a password", "a token", "a revocation", "all tokens", "a logout"],
)
def test_it_is_on_the_disk(database: Database, change: Callable[[Transaction], object]) -> None:
    database.write(log_in)
    assert not is_on_the_disk(database)

    database.write(change)

    assert is_on_the_disk(database)


def test_a_login_is_not_waited_for(database: Database) -> None:
    database.write(log_in)

    assert not is_on_the_disk(database)
