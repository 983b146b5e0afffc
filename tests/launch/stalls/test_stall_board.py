"""What launchers tell each other of a stall: read by the others, taken back, and nothing is followed or waited for long."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from dstrial.launch.stalls.stall_board import NodeAccount, StallBoard
from dstrial.ranks.rendezvous_store import serve_store
from dstrial.ranks.sockets import free_port

pytestmark = pytest.mark.process


@pytest.fixture
def store() -> Any:
    return serve_store("127.0.0.1", 0, datetime.timedelta(seconds=10))


def boards(store: Any) -> list[StallBoard]:
    return [StallBoard("127.0.0.1", store.port, node, 3) for node in range(3)]


def test_each_reads_what_the_others_say_until_they_take_it_back(store: Any) -> None:
    first, second, third = boards(store)
    second.tell("rank 2 is stopped", has_guilty=True)
    third.tell("all 2 ranks wait", has_guilty=False)
    assert first.ask(0.0) == [
        NodeAccount(1, "rank 2 is stopped", True),
        NodeAccount(2, "all 2 ranks wait", False),
    ]
    second.tell("", has_guilty=True)
    assert first.ask(0.2) == [NodeAccount(1, "", False), NodeAccount(2, "all 2 ranks wait", False)]
    assert third.ask(0.0) == [NodeAccount(0, "", False), NodeAccount(1, "", False)]


def test_what_is_no_account_is_taken_for_none_and_shown_as_text(store: Any) -> None:
    first = boards(store)[0]
    for said in ("", "null", "[1]", '{"text": "x"}'):
        store.set("dstrial/stall/1", said)
        assert first.ask(0.0) == [NodeAccount(1, "", False), NodeAccount(2, "", False)]
    store.set("dstrial/stall/1", '{"text": "\\u001b[2J", "has_guilty": true}')
    (one, _) = first.ask(0.0) or []
    assert "\x1b" not in one.text


def test_a_store_that_is_not_there_is_no_error() -> None:
    board = StallBoard("127.0.0.1", free_port(), 1, 2)
    board.tell("rank 2 is stopped", has_guilty=True)
    assert board.ask(0.0) is None
