"""How many slots elastic trials get."""

from __future__ import annotations

import pytest

from dstrial.master.scheduler.queue import Waiting, assignments
from dstrial.master.scheduler.resizing import grown
from dstrial.master.store.nodes import slot_id_of

FOUR = set(range(4))


@pytest.mark.parametrize(
    ("free", "choices", "max_slots", "used", "expected"),
    [
        ({0, 1, 2}, (4, 2, 1), None, 0, [2]),
        (FOUR, (4, 2, 1), None, 0, [4]),
        ({0}, (4, 2), None, 0, []),
        (FOUR, (4, 2, 1), 3, 0, [2]),
        (FOUR, (4, 2, 1), 3, 2, [1]),
    ],
)
def test_trial_takes_first_free_choice_within_max_slots(
    free: set[int], choices: tuple[int, ...], max_slots: int | None, used: int, expected: list[int]
) -> None:
    one = Waiting(1, 7, 4, max_slots, choices=choices)
    assert [len(slots) for _, slots in assignments([one], free, FOUR, {7: used})] == expected


@pytest.mark.parametrize(
    ("free", "choices", "max_slots", "used", "expected"),
    [
        ({1, 2, 3}, (4, 3, 2), None, 1, 4),
        ({2, 3}, (4, 3, 2), None, 1, 3),
        ({2, 3}, (4,), None, 1, 0),
        pytest.param({1, 2, 3}, (4, 3, 2), 4, 3, 2, id="two more are used by another trial"),
    ],
)
def test_grown_picks_largest_free_and_allowed_choice(
    free: set[int], choices: tuple[int, ...], max_slots: int | None, used: int, expected: int
) -> None:
    one = Waiting(1, 1, choices[0], max_slots, choices=choices)
    assert grown(one, [0], free, FOUR, used) == expected


def test_single_node_trial_grows_on_its_node() -> None:
    slots = {slot_id_of(node, index) for node in (1, 2) for index in (0, 1)}
    first = slot_id_of(1, 0)
    one = Waiting(1, 1, 4, None, is_on_one_node=True, choices=(4, 3, 2))

    assert grown(one, [first], slots - {first}, slots, 1) == 2
