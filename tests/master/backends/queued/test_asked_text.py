"""What the log of a trial says first of the job that was asked for it: pure."""

from __future__ import annotations

from dstrial.master.backends.backend import Wish
from dstrial.master.backends.queued.backend import asked_text

_TITLE = "trial 7 of experiment 2 (gpt)"


def wish(num_slots: int, *, is_on_one_node: bool = False) -> Wish:
    return Wish(7, num_slots, is_on_one_node, frozenset(), lambda: (_TITLE, {}))


def test_it_says_who_is_asked_for_what_and_for_whom() -> None:
    assert asked_text("job 12", "Slurm", 4, wish(4), _TITLE) == (
        "job 12: pending (Slurm is asked for 4 slots for trial 7 of experiment 2 (gpt))"
    )
    assert asked_text("placement group 1a2b3c4d", "Ray", 1, wish(1, is_on_one_node=True), _TITLE) == (
        "placement group 1a2b3c4d: pending (Ray is asked for 1 slot on one node for trial 7 of experiment 2 (gpt))"
    )


def test_it_says_that_fewer_are_asked_for_than_are_wanted() -> None:
    assert asked_text("job 12", "Slurm", 2, wish(4), _TITLE).endswith(
        "is asked for 2 slots for trial 7 of experiment 2 (gpt), for 4 are more than there are)"
    )
