"""Agents (nodes) with their slots, and the single resource pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.backends.backend import Node
from dstrial.master.clock import format_us
from dstrial.master.http.fields import shown
from dstrial.master.http.messages import message, page_of
from dstrial.master.http.router import ADMIN, USER, ApiRequest, Handler, route
from dstrial.master.services import VERSION, Services
from dstrial.master.store import allocations, jobs
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection
from dstrial.master.store.nodes import OWN_NODE, agent_key, index_of, node_of, slot_id_of

_DEVICE_TYPES = {"cpu": "TYPE_CPU", "cuda": "TYPE_CUDA", "rocm": "TYPE_ROCM"}
_MAX_AUX_CONTAINERS = 100
_MAX_NAMED = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Usage:
    """Snapshot of devices, disabled slots and allocations."""

    disabled: Mapping[int, bool]
    devices: Mapping[int, dict[str, Any]]  # slot -> v1Device
    allocations: tuple[Allocation, ...]
    # Node -> (slots, v1Container) of each allocation on the node.
    containers: Mapping[int, list[tuple[list[int], dict[str, Any]]]]
    num_queued: int


def _read_usage(connection: Connection, devices: Mapping[int, dict[str, Any]]) -> _Usage:
    rows = tuple(allocations.not_ended(connection))
    containers: dict[int, list[tuple[list[int], dict[str, Any]]]] = {}
    for row in rows:
        by_node: dict[int, list[int]] = {}
        for slot_id in row.slots:
            by_node.setdefault(node_of(slot_id), []).append(slot_id)
        # An allocation without slots runs on the master's own node.
        for node_id, slots in (by_node or {OWN_NODE: []}).items():
            containers.setdefault(node_id, []).append((slots, _container(devices, row, slots)))
    disabled = jobs.disabled_slots(connection, devices.keys())
    return _Usage(disabled, devices, rows, containers, jobs.count_without_slots(connection))


def devices_of(services: Services) -> dict[int, dict[str, Any]]:
    return {
        slot.id: message(
            bindings.v1Device,
            id=index_of(slot.id),
            brand=slot.brand,
            uuid=slot.uuid,
            type=_DEVICE_TYPES.get(slot.kind, "TYPE_UNSPECIFIED"),
        )
        for slot in services.slots
    }


def device_json(devices: Mapping[int, dict[str, Any]], slot_id: int) -> dict[str, Any]:
    return devices.get(slot_id) or message(bindings.v1Device, id=index_of(slot_id), type="TYPE_UNSPECIFIED")


def _container(
    devices: Mapping[int, dict[str, Any]], allocation: Allocation, slots: list[int]
) -> dict[str, Any]:
    return message(
        bindings.v1Container,
        id=allocation.resources_id,
        state="STATE_RUNNING" if allocation.state == "RUNNING" else "STATE_ASSIGNED",
        devices=[device_json(devices, slot_id) for slot_id in slots],
        permissionDenied=False,
    )


def _slots(usage: _Usage, node: Node) -> dict[str, dict[str, Any]]:
    """Return a node's slots as slot index -> v1Slot."""
    containers = {slot_id: one for slots, one in usage.containers.get(node.id, []) for slot_id in slots}
    return {
        str(index_of(slot.id)): message(
            bindings.v1Slot,
            id=str(index_of(slot.id)),
            device=device_json(usage.devices, slot.id),
            enabled=slot.id not in usage.disabled,
            draining=usage.disabled.get(slot.id, False),
            container=containers.get(slot.id),
        )
        for slot in node.slots
    }


def _stats(slots: Iterable[dict[str, Any]], key: str) -> dict[str, Any]:
    """Count v1Slots (total, disabled, draining, by state) per value of a device field."""
    counts: dict[str, dict[str, Any]] = {}
    for slot in slots:
        empty = {"total": 0, "disabled": 0, "draining": 0, "states": {}}
        one = counts.setdefault(slot["device"][key] or "", empty)
        one["total"] += 1
        one["disabled"] += not slot["enabled"] and not slot["draining"]
        one["draining"] += slot["draining"]
        if slot["container"] is not None:
            state = slot["container"]["state"]
            one["states"][state] = one["states"].get(state, 0) + 1
    return counts


def _agent(
    services: Services, usage: _Usage, node: Node, *, has_slots: bool = True, has_containers: bool = True
) -> dict[str, Any]:
    key, slots = agent_key(node.id), _slots(usage, node)
    return message(
        bindings.v1Agent,
        id=node.name,
        version=VERSION,
        registeredTime=format_us(services.start_us if node.id == OWN_NODE else node.since_us),
        addresses=[node.address],
        resourcePools=[services.settings.pool_name],
        # A node that is down accepts no work, as if a user had disabled it.
        enabled=key not in usage.disabled and node.why_down is None,
        draining=usage.disabled.get(key, False),
        slots=slots if has_slots else None,
        containers={one["id"]: one for _, one in usage.containers.get(node.id, [])}
        if has_containers
        else None,
        slotStats=message(
            bindings.v1SlotStats,
            brandStats=_stats(slots.values(), "brand"),
            typeStats=_stats(slots.values(), "type"),
        ),
    )


async def _current_usage(request: ApiRequest) -> _Usage:
    return await request.services.read(_read_usage, devices_of(request.services))


def _node_in_path(request: ApiRequest) -> Node:
    asked = request.path_params["agent_id"]
    found = request.services.backend.nodes()
    for node in found:
        if node.name == asked:
            return node
    if len(found) == 1:
        raise RequestError(
            404, f"agent {asked!r} does not exist; expected {found[0].name!r}, the only one. Name that one."
        )
    names = ", ".join(node.name for node in found[:_MAX_NAMED])
    raise RequestError(404, f"agent {asked!r} does not exist; expected one of {names}. See `det agent list`.")


def _slot_in_path(request: ApiRequest) -> tuple[Node, int]:
    """Return the slot named in the path; clients send both ``3`` and ``003``."""
    node = _node_in_path(request)
    text = request.path_params["slot_id"]
    offered = [slot.id for slot in node.slots]
    if text.isascii() and text.isdecimal() and len(text) < 10:
        slot_id = slot_id_of(node.id, int(text))
        if slot_id in offered:
            return node, slot_id
    raise RequestError(
        404, f"slot {text[:80]!r} does not exist; expected 0 to {len(offered) - 1}. See `det slot list`."
    )


async def list_agents(request: ApiRequest) -> dict[str, Any]:
    usage = await _current_usage(request)
    agents = [
        _agent(
            request.services,
            usage,
            node,
            has_slots=not request.query_flag("excludeSlots"),
            has_containers=not request.query_flag("excludeContainers"),
        )
        for node in request.services.backend.nodes()
    ]
    page = page_of(len(agents), request.query_int("offset"), request.query_int("limit"))
    return {"agents": agents[page.start : page.end], "pagination": page.to_json()}


def _switch_agent(*, is_on: bool) -> Handler:
    async def switch(request: ApiRequest) -> dict[str, Any]:
        node = _node_in_path(request)
        key = agent_key(node.id)
        drain = request.body().flag("drain") or False
        reason = "the agent was disabled" if node.id == OWN_NODE else f"agent {node.name} was disabled"
        if is_on:
            await request.services.write(lambda tx: jobs.enable_slot(tx, key))
        else:
            await request.services.write(lambda tx: jobs.disable_slot(tx, key, drain=drain, reason=reason))
        return {"agent": _agent(request.services, await _current_usage(request), node)}

    return switch


def _switch_slot(*, is_on: bool) -> Handler:
    async def switch(request: ApiRequest) -> dict[str, Any]:
        node, slot_id = _slot_in_path(request)
        drain = request.body().flag("drain") or False
        where = "" if node.id == OWN_NODE else f" of {node.name}"
        reason = f"slot {index_of(slot_id)}{where} was disabled"
        if is_on:
            await request.services.write(lambda tx: jobs.enable_slot(tx, slot_id))
        else:
            await request.services.write(
                lambda tx: jobs.disable_slot(tx, slot_id, drain=drain, reason=reason)
            )
        return {"slot": _slots(await _current_usage(request), node)[str(index_of(slot_id))]}

    return switch


async def list_pools(request: ApiRequest) -> dict[str, Any]:
    services = request.services
    usage = await _current_usage(request)
    places = services.backend.nodes()
    kinds = {_DEVICE_TYPES.get(slot.kind, "TYPE_UNSPECIFIED") for slot in services.slots}
    pool = message(
        bindings.v1ResourcePool,
        name=services.settings.pool_name,
        description="the devices of this machine"
        if len(places) == 1
        else f"the devices of {len(places)} machines",
        type="RESOURCE_POOL_TYPE_STATIC",
        numAgents=len(places),
        slotsAvailable=len(services.slots),
        slotsUsed=sum(len(row.slots) for row in usage.allocations),
        slotType=kinds.pop() if len(kinds) == 1 else "TYPE_UNSPECIFIED",
        slotsPerAgent=max((len(place.slots) for place in places), default=0),
        auxContainerCapacity=_MAX_AUX_CONTAINERS,
        auxContainerCapacityPerAgent=_MAX_AUX_CONTAINERS,
        auxContainersRunning=sum(not row.slots for row in usage.allocations),
        defaultComputePool=True,
        defaultAuxPool=True,
        preemptible=False,
        schedulerType="SCHEDULER_TYPE_PRIORITY",
        schedulerFittingPolicy="FITTING_POLICY_BEST",
        details=message(
            bindings.v1ResourcePoolDetail,
            priorityScheduler=message(
                bindings.v1ResourcePoolPrioritySchedulerDetail, preemption=False, defaultPriority=42
            ),
        ),
        stats=queue_stats(usage.num_queued, len({row.experiment_id for row in usage.allocations})),
        resourceManagerMetadata={},
        clusterName="",
        minAgents=0,
        maxAgents=0,
        maxAgentStartingPeriod=0.0,
        maxIdleAgentPeriod=0.0,
        **dict.fromkeys(
            (
                *("agentDockerImage", "agentDockerNetwork", "agentDockerRuntime", "agentFluentImage"),
                *(
                    "containerStartupScript",
                    "imageId",
                    "instanceType",
                    "location",
                    "masterCertName",
                    "masterUrl",
                ),
                *("startupScript", "accelerator"),
            ),
            "",
        ),
    )
    page = page_of(1, request.query_int("offset"), request.query_int("limit"))
    return {"resourcePools": [pool][page.start : page.end], "pagination": page.to_json()}


async def list_bindings(request: ApiRequest) -> dict[str, Any]:
    asked, pool_name = request.path_params["pool"], request.services.settings.pool_name
    if asked != pool_name:
        raise RequestError(
            404,
            f"resource pool {shown(asked)} does not exist; expected {pool_name!r}, the only one. Name that one.",
        )
    page = page_of(0, request.query_int("offset"), request.query_int("limit"))
    return message(bindings.v1ListWorkspacesBoundToRPResponse, workspaceIds=[], pagination=page.to_json())


def queue_stats(num_queued: int, num_scheduled: int) -> dict[str, Any]:
    return message(bindings.v1QueueStats, queuedCount=num_queued, scheduledCount=num_scheduled)


routes = [
    route("GET", "/agents", list_agents, access=USER),
    route("POST", "/agents/{agent_id}/enable", _switch_agent(is_on=True), access=ADMIN),
    route("POST", "/agents/{agent_id}/disable", _switch_agent(is_on=False), access=ADMIN),
    route("POST", "/agents/{agent_id}/slots/{slot_id}/enable", _switch_slot(is_on=True), access=ADMIN),
    route("POST", "/agents/{agent_id}/slots/{slot_id}/disable", _switch_slot(is_on=False), access=ADMIN),
    route("GET", "/resource-pools", list_pools, access=USER),
    route("GET", "/resource-pools/{pool}/workspace-bindings", list_bindings, access=USER),
]
