"""What an engine is asked about a config that is only submitted; pure."""

from __future__ import annotations

from typing import Any

from dstrial.master.backends.backend import Node
from dstrial.master.backends.devices import Slot
from dstrial.master.scheduler.wishes import wish_of_config

_NODES = [Node(1, "a", "a", (Slot(10, "cpu", "", "a-0"), Slot(11, "cpu", "", "a-1")), None, 0)]


def config(num_slots: int, **resources: Any) -> dict[str, Any]:
    return {"name": "gpt", "resources": {"slots_per_trial": num_slots, **resources}, "slurm": {}}


def test_it_asks_for_what_its_trials_will() -> None:
    asked = wish_of_config(config(3, is_single_node=True), _NODES, may_wait=False)
    assert asked is not None
    assert (asked.num_slots, asked.is_on_one_node, asked.has_run) == (3, True, False)
    assert asked.describe()[0] == "gpt"
    # What fits on one node is not asked for as undivided, as it is not later.
    asked = wish_of_config(config(2, is_single_node=True), _NODES, may_wait=True)
    assert asked is not None
    assert (asked.is_on_one_node, asked.has_run) == (False, True)


def test_without_slots_nobody_is_asked() -> None:
    assert wish_of_config(config(0), _NODES, may_wait=False) is None
