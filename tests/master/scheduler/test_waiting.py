"""What a trial that waits for slots is told."""

from __future__ import annotations

import pytest

from dstrial.master.scheduler.waiting import Holder, waiting_text

FIRST = Holder("trial 1 of experiment 1 (gpt)", 1, 2)
SECOND = Holder("task shell-7", 0, 1)


@pytest.mark.parametrize(
    ("num_slots", "num_enabled", "holders", "max_slots", "before", "told"),
    [
        pytest.param(
            1,
            2,
            [FIRST],
            None,
            None,
            "waiting for 1 slot: 2 of 2 are in use, by trial 1 of experiment 1 (gpt) on 2",
            id="held by a trial",
        ),
        pytest.param(
            2,
            4,
            [FIRST, SECOND],
            None,
            None,
            "waiting for 2 slots: 3 of 4 are in use, by trial 1 of experiment 1 (gpt) on 2, task shell-7 on 1",
            id="held by several",
        ),
        pytest.param(
            1,
            8,
            [FIRST, SECOND, SECOND, SECOND, SECOND],
            None,
            None,
            "waiting for 1 slot: 6 of 8 are in use, by trial 1 of experiment 1 (gpt) on 2, task shell-7 on 1, task shell-7 on 1, "
            "2 others",
            id="many are counted",
        ),
        pytest.param(
            1,
            4,
            [FIRST],
            None,
            "trial 5",
            "waiting for 1 slot: trial 5 is before it in the queue, and needs more than is free",
            id="behind a larger one",
        ),
        pytest.param(
            2,
            8,
            [Holder("trial 3 of experiment 9 (x)", 9, 2)],
            2,
            None,
            "waiting for 2 slots: its experiment uses 2 of the 2 that resources.max_slots allows",
            id="its experiment has as many as it may",
        ),
    ],
)
def test_a_wait_is_told_with_its_reason(
    num_slots: int,
    num_enabled: int,
    holders: list[Holder],
    max_slots: int | None,
    before: str | None,
    told: str,
) -> None:
    text = waiting_text(num_slots, num_enabled, holders, experiment_id=9, max_slots=max_slots, before=before)
    assert text == told
