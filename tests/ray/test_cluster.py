"""Parsing of Ray's cluster state, and distribution of slots over nodes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.ray.cluster import parse_groups, parse_nodes, slots_per_node


def node(number: str, name: str, port: int = 1, **values: Any) -> dict[str, Any]:
    resources = {"CPU": 2.0, "memory": 1.0, f"node:{name}": 1.0}
    return {
        "NodeID": number, "NodeName": name, "NodeManagerAddress": name, "NodeManagerHostname": "same", "NodeManagerPort": port,
        "Alive": True, "DeathReasonMessage": "", "Resources": resources, **values,
    }  # fmt: skip


def seen(nodes: list[dict[str, Any]], **values: Any) -> dict[str, Any]:
    return {"nodes": nodes, "free": {}, "draining": {}, "groups": {}, **values}


def test_parse_nodes_adds_port_to_duplicate_live_names() -> None:
    dead = node("d", "left", Alive=False, Resources={}, DeathReasonMessage="health check failed")
    nodes = parse_nodes(
        seen([node("a", "10.0.0.1", 11), node("b", "10.0.0.1", 12), dead, node("c", "left", 13)])
    )
    assert [one.name for one in nodes] == ["10.0.0.1:11", "10.0.0.1:12", "left", "left"]
    assert [one.is_alive for one in nodes] == [True, True, False, True]
    assert nodes[2].death_reason == "health check failed"


def test_parse_nodes_matches_free_and_draining_by_id() -> None:
    nodes = parse_nodes(seen([node("a", "x"), node("b", "y")], free={"a": {"CPU": 1.0}}, draining={"b": 5}))
    assert [(one.free, one.is_draining) for one in nodes] == [({"CPU": 1.0}, False), ({}, True)]
    assert nodes[0].num_slots("CPU") == 2
    assert nodes[0].num_slots("GPU") == 0


def group(state: str, places: dict[str, str]) -> dict[str, Any]:
    bundles = {"0": {"CPU": 2.0}, "1": {"CPU": 1.0}, "10": {"CPU": 1.0}}
    return {
        "name": "dstrial c k t", "state": state, "bundles": bundles, "bundles_to_node_id": places,
    }  # fmt: skip


@pytest.mark.parametrize(("state", "nodes"), [("CREATED", ("a", "b", "c")), ("PENDING", ("", "", ""))])
def test_parse_groups_sorts_bundles_by_index(state: str, nodes: tuple[str, ...]) -> None:
    places = dict(zip(("10", "1", "0"), reversed(nodes), strict=True))
    (found,) = parse_groups(seen([], groups={"g": group(state, places)}))
    assert found.node_ids == nodes
    assert [bundle["CPU"] for bundle in found.bundles] == [2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("num_slots", "capacities", "shares"),
    [
        (1, [2, 2, 2], (1,)),
        (2, [2, 2, 2], (2,)),
        (4, [2, 2, 2], (2, 2)),
        (3, [2, 2, 2], (2, 1)),
        (5, [2, 2, 2], (2, 2, 1)),
        (12, [8, 8, 8], (6, 6)),
        (12, [8, 4, 4], (8, 4)),
        (10, [8, 4, 4], (8, 2)),
        (10, [8, 6, 4], (5, 5)),
        (7, [2, 2, 2], None),
        (1, [], None),
        (1, [0, 0], None),
    ],
)
def test_slots_per_node_minimizes_nodes_then_balances(
    num_slots: int, capacities: list[int], shares: tuple[int, ...] | None
) -> None:
    assert slots_per_node(num_slots, capacities) == shares


def test_slots_per_node_single_node_needs_capacity() -> None:
    assert slots_per_node(2, [2, 2], is_on_one_node=True) == (2,)
    assert slots_per_node(3, [2, 2], is_on_one_node=True) is None


@given(st.integers(1, 40), st.lists(st.integers(0, 9), max_size=8))
def test_slots_per_node_covers_request_within_capacities(num_slots: int, capacities: list[int]) -> None:
    shares = slots_per_node(num_slots, capacities)
    if shares is None:
        assert num_slots > sum(capacities)
        return
    largest = sorted(capacities, reverse=True)
    assert sum(shares) == num_slots
    assert min(shares) >= 1
    assert all(share <= most for share, most in zip(sorted(shares, reverse=True), largest, strict=False))
    assert sum(largest[: len(shares) - 1]) < num_slots
