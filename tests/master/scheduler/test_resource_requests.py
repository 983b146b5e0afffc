"""Pure functions: resource requests to an engine, and allocations to start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.master.backends.backend import Answer, Node
from dstrial.master.backends.devices import Slot
from dstrial.master.scheduler.queue import Waiting
from dstrial.master.scheduler.resource_requests import request_of_config, requests_of, starts_of

_NODES = [Node(1, "a", "a", (Slot(10, "cpu", "", "a-0"), Slot(11, "cpu", "", "a-1")), None, 0)]


def describe(key: int | str) -> tuple[str, Mapping[str, Any]]:
    return f"title of {key}", {}


def config(num_slots: int, **resources: Any) -> dict[str, Any]:
    return {"name": "gpt", "resources": {"slots_per_trial": num_slots, **resources}, "slurm": {}}


def test_requests_respect_max_slots_and_skip_zero_slots() -> None:
    waiting = [
        Waiting(1, 1, 2, 4, choices=(4, 2, 1)),
        Waiting(2, 1, 2, 4),
        Waiting(3, 2, 1, None, excluded_nodes=frozenset({5})),
        Waiting("shell", 0, 0, None),
    ]
    found = list(requests_of(waiting, {1: 2}, frozenset({6}), describe))
    assert [one.key for one in found] == [1, 3]
    assert [one.fewer for one in found] == [(1,), ()]
    assert found[1].excluded_nodes == {5, 6}
    assert [one.describe()[0] for one in found] == ["title of 1", "title of 3"]


def test_starts_are_granted_or_zero_slot_requests() -> None:
    waiting = [Waiting(1, 1, 2, None), Waiting(2, 1, 2, None), Waiting("shell", 0, 0, None)]
    assert starts_of(waiting, Answer(slots={2: (1024, 1025)})) == [(2, [1024, 1025]), ("shell", [])]


def test_request_of_config_matches_trial_requests() -> None:
    asked = request_of_config(config(3, is_single_node=True), _NODES, may_wait=False)
    assert asked is not None
    assert (asked.num_slots, asked.is_on_one_node, asked.may_wait) == (3, True, False)
    assert asked.describe()[0] == "gpt"
    # is_single_node matters only for a request larger than every node, as for trials later.
    asked = request_of_config(config(2, is_single_node=True), _NODES, may_wait=True)
    assert asked is not None
    assert (asked.is_on_one_node, asked.may_wait) == (False, True)


def test_request_of_config_without_slots_is_none() -> None:
    assert request_of_config(config(0), _NODES, may_wait=False) is None
