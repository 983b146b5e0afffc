"""API of agents, slots and resource pools."""

from __future__ import annotations

import pytest
from determined.common import api
from determined.common.api import bindings
from serving import NUM_SLOTS, Master

from dstrial.master.store import jobs
from dstrial.master.store.nodes import agent_key

pytestmark = pytest.mark.process


def test_agent_slots_join_with_running_tasks(fresh_master: Master, admin: api.Session) -> None:
    (agent,) = bindings.get_GetAgents(admin).agents
    assert agent.slots is not None
    assert len(agent.slots) == NUM_SLOTS
    summaries = bindings.get_GetTasks(admin).allocationIdToSummary or {}
    names = {
        resources.containerId: summary.name
        for summary in summaries.values()
        for resources in summary.resources or []
    }
    on_slots = [slot.container and names[slot.container.id] for slot in agent.slots.values()]
    assert on_slots == ["Trial 1 (Experiment 1)", "Trial 2 (Experiment 2)", None, None]
    assert agent.slotStats.typeStats["TYPE_CPU"].total == NUM_SLOTS


def test_slot_is_disabled_and_enabled(fresh_master: Master, admin: api.Session) -> None:
    agent_id = fresh_master.services.agent_id
    seen = fresh_master.services.pubsub.version("scheduler")
    body = bindings.v1DisableSlotRequest()
    slot = bindings.post_DisableSlot(admin, agentId=agent_id, slotId="3", body=body).slot
    assert slot is not None
    assert slot.enabled is False
    (agent,) = bindings.get_GetAgents(admin).agents
    assert [one.enabled for one in (agent.slots or {}).values()] == [*[True] * 3, False]
    assert fresh_master.rows("SELECT slot_id FROM disabled_slots") == [{"slot_id": 3}]
    assert fresh_master.services.pubsub.version("scheduler") > seen
    again = bindings.post_EnableSlot(admin, agentId=agent_id, slotId="003").slot
    assert again is not None
    assert again.enabled is True


def test_disable_slot_kills_allocation_unless_draining(fresh_master: Master, admin: api.Session) -> None:
    agent_id = fresh_master.services.agent_id
    for slot_id, drain in (("0", False), ("1", True)):
        bindings.post_DisableSlot(
            admin, agentId=agent_id, slotId=slot_id, body=bindings.v1DisableSlotRequest(drain=drain)
        )
    rows = fresh_master.rows(
        "SELECT kill_us IS NOT NULL AS is_killed, kill_reason FROM allocations ORDER BY id"
    )
    assert rows == [
        {"is_killed": 1, "kill_reason": "slot 0 was disabled"},
        {"is_killed": 0, "kill_reason": None},
    ]


def test_disabled_agent_disables_all_slots(fresh_master: Master, admin: api.Session) -> None:
    agent_id = fresh_master.services.agent_id
    admin.post(f"api/v1/agents/{agent_id}/disable", json={"drain": True})
    (agent,) = bindings.get_GetAgents(admin).agents
    assert (agent.enabled, agent.draining) == (False, True)
    with fresh_master.services.database.read() as connection:
        off = jobs.disabled_slots(connection, range(NUM_SLOTS))
    assert set(off) == {agent_key(0), *range(NUM_SLOTS)}
    assert all(off.values())
    assert fresh_master.rows("SELECT id FROM allocations WHERE kill_us IS NOT NULL") == []
    admin.post(f"api/v1/agents/{agent_id}/enable")
    (agent,) = bindings.get_GetAgents(admin).agents
    assert agent.enabled is True


@pytest.mark.parametrize("path", ["nobody", "nobody/slots/0", "{agent}/slots/99", "{agent}/slots/x"])
def test_disable_unknown_agent_or_slot_is_404(served: Master, path: str) -> None:
    path = f"/api/v1/agents/{path.format(agent=served.services.agent_id)}/disable"
    assert served.send("POST", path, {}, token="admin").status == 404
