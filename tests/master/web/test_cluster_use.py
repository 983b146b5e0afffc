"""Slot usage over time, free slots, and reasons for waiting, without a master."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrial.master.backends.backend import Node
from dstrial.master.backends.devices import Slot
from dstrial.master.store.nodes import agent_key
from dstrial.master.web.cluster import SlotCounts, count_slots, pending_reason, usage


def test_usage_is_averaged_per_bucket() -> None:
    # Buckets of 10: two slots from 5 to 20, and one slot from 30 on.
    assert usage([(2, 5, 20), (1, 30, None)], 0, 40, 4) == [1.0, 2.0, 0.0, 1.0]
    assert usage([(1, -100, 100)], 0, 10, 2) == [1.0, 1.0]
    assert usage([], 0, 10, 3) == [0.0, 0.0, 0.0]


def test_negative_span_does_not_reduce_usage() -> None:
    # If the clock was set back, a span may end before its start.
    assert usage([(1, 0, 10), (4, 8, 2)], 0, 10, 2) == [1.0, 1.0]


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(-50, 150), st.integers(0, 150)), max_size=20),
    st.integers(1, 40),
)
def test_bucketing_preserves_total_usage(spans: list[tuple[int, int, int]], num: int) -> None:
    given_spans = [(slots, start, start + length) for slots, start, length in spans]
    used = sum(slots * max(0, min(end, 100) - max(start, 0)) for slots, start, end in given_spans)
    parts = usage(given_spans, 0, 100, num)
    assert sum(parts) * 100 / num == pytest.approx(used, abs=1e-6)
    assert all(part >= 0 for part in parts)


def test_disabled_or_down_slots_are_not_usable() -> None:
    def node(node_id: int, *slots: int, why_down: str | None = None) -> Node:
        found = tuple(Slot(slot, "cpu", "cpu", f"cpu-{slot}") for slot in slots)
        return Node(node_id, f"n{node_id}", "127.0.0.1", found, why_down, 0)

    nodes = (node(0, 0, 1, 2), node(1, 1024, 1025), node(2, 2048, why_down="it does not answer"))
    assert count_slots(nodes, {}, frozenset({0})) == SlotCounts(usable=5, free=4)
    assert count_slots(nodes, {2: True, agent_key(1): False}, frozenset({0})) == SlotCounts(usable=2, free=1)


def test_pending_reason_describes_demand_and_supply() -> None:
    counts = SlotCounts(usable=4, free=1)
    assert pending_reason(2, 0, 3, counts) == ""
    assert pending_reason(1, 1, 0, counts) == "waits for 1 slot: 1 of 4 free"
    assert pending_reason(2, 3, 1, counts) == "3 wait for 2 slots each: 1 of 4 free, 1 ahead"
    assert pending_reason(8, 1, 0, counts) == "waits for 8 slots: only 4 can be used now"
