"""Who is to ask an engine for slots, and who begins: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.master.backends.backend import Answer
from dstrial.master.scheduler.elasticity import Growth
from dstrial.master.scheduler.queue import Waiting
from dstrial.master.scheduler.wishes import begins_of, growth_of, wishes_of


def describe(key: int | str) -> tuple[str, Mapping[str, Any]]:
    return f"title of {key}", {}


def test_nobody_asks_for_more_than_its_experiment_may_have_and_who_needs_none_does_not_ask() -> None:
    waiting = [
        Waiting(1, 1, 2, 4, choices=(4, 2, 1)),
        Waiting(2, 1, 2, 4),
        Waiting(3, 2, 1, None, kept_off=frozenset({5})),
        Waiting("shell", 0, 0, None),
    ]
    found = list(wishes_of(waiting, {1: 2}, frozenset({6}), {1}, describe))
    assert [one.key for one in found] == [1, 3]
    assert [(one.fewer, one.has_run) for one in found] == [((1,), True), ((), False)]
    assert found[1].kept_off == {5, 6}
    assert [one.describe()[0] for one in found] == ["title of 1", "title of 3"]


def test_who_moves_says_so() -> None:
    waiting = [Waiting(1, 1, 2, None), Waiting(2, 1, 2, None)]
    assert [one.is_move for one in wishes_of(waiting, {}, frozenset(), {1}, describe, {2})] == [False, True]


def test_who_has_got_slots_begins_and_who_needs_none() -> None:
    waiting = [Waiting(1, 1, 2, None), Waiting(2, 1, 2, None), Waiting("shell", 0, 0, None)]
    assert begins_of(waiting, Answer(slots={2: (1024, 1025)})) == [(2, [1024, 1025]), ("shell", [])]


def test_who_grows_asks_where_it_may_run() -> None:
    growing = {7: Growth(4, True, frozenset({5})), 8: Growth(2), 9: Growth(3, is_move=True)}
    found = list(growth_of(growing, describe))  # 9 asks once it has stopped
    assert [(one.key, one.num_slots, one.is_on_one_node, one.kept_off) for one in found] == [
        (7, 4, True, frozenset({5})),
        (8, 2, False, frozenset()),
    ]
    assert all(one.is_growth and one.has_run and not one.fewer for one in found)
    assert found[0].describe()[0] == "title of 7"
