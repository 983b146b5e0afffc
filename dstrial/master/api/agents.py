"""Routes for agents (nodes), their slots, and the single resource pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.backends.backend import Node
from dstrial.master.clock import format_us
from dstrial.master.http.fields import shown
from dstrial.master.http.responses import message
from dstrial.master.http.router import ADMIN, USER, ApiRequest, reads, route, writes
from dstrial.master.services import VERSION, Services
from dstrial.master.store import allocations, jobs
from dstrial.master.store.allocations import Allocation
from dstrial.master.store.database import Connection, Transaction
from dstrial.master.store.nodes import OWN_NODE, agent_key, index_of, node_of, slot_id_of

_DEVICE_TYPES = {"cpu": "TYPE_CPU", "cuda": "TYPE_CUDA", "rocm": "TYPE_ROCM"}
_MAX_AUX_CONTAINERS = 100  # shown as the limit of commands without slots
_MAX_NAMED = 10  # names of agents in an error message
_CLOUD_FIELDS = (  # fields of a resource pool in a cloud, empty here
    *("agentDockerImage", "agentDockerNetwork", "agentDockerRuntime", "agentFluentImage", "accelerator"),
    *("containerStartupScript", "imageId", "instanceType", "location", "masterCertName", "masterUrl"),
    "startupScript",
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Usage:
    """Which slots are disabled or in use, read in one snapshot of the database."""

    # Id of a disabled slot, or ``agent_key`` of a disabled node -> whether its running work may finish (drain).
    disabled: Mapping[int, bool]
    devices: Mapping[int, dict[str, Any]]  # slot id -> v1Device
    allocations: tuple[Allocation, ...]  # those that have not ended
    # Node id -> (slot ids, v1Container) of each allocation on the node.
    containers: Mapping[int, list[tuple[list[int], dict[str, Any]]]]
    num_queued: int  # active experiments without an allocation


def _read_usage(connection: Connection, devices: Mapping[int, dict[str, Any]]) -> _Usage:
    rows = tuple(allocations.all_live(connection))
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
    """Return slot counts (total, disabled etc.) per value of a device field.

    The field ``key`` is for example "brand".
    """
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
        # Show a node that is down as disabled, as it accepts no work.
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
    """Return the node and slot id that the path names; leading zeros are ignored."""
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


@reads
def list_agents(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    usage = _read_usage(connection, devices_of(request.services))
    has_slots = not request.query_flag("excludeSlots")
    has_containers = not request.query_flag("excludeContainers")
    nodes, pagination = request.page(request.services.backend.nodes())
    agents = [
        _agent(request.services, usage, node, has_slots=has_slots, has_containers=has_containers)
        for node in nodes
    ]
    return {"agents": agents, "pagination": pagination}


def _switch(tx: Transaction, request: ApiRequest, slot_id: int, what: str) -> _Usage:
    """Enable or disable a slot or node, as the route's path says; return the usage.

    ``slot_id`` is a slot's id, or ``agent_key`` of a node. ``what`` names the slot or node in the logs of tasks that are
    stopped.
    """
    if request.route.path.endswith("/enable"):
        jobs.enable_slot(tx, slot_id)
    else:
        drain = request.body().flag("drain") or False
        jobs.disable_slot(tx, slot_id, drain=drain, reason=f"{what} was disabled")
    return _read_usage(tx.connection, devices_of(request.services))


@writes
def switch_agent(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    node = _node_in_path(request)
    what = "the agent" if node.id == OWN_NODE else f"agent {node.name}"
    usage = _switch(tx, request, agent_key(node.id), what)
    return {"agent": _agent(request.services, usage, node)}


@writes
def switch_slot(tx: Transaction, request: ApiRequest) -> dict[str, Any]:
    node, slot_id = _slot_in_path(request)
    what = f"slot {index_of(slot_id)}" + ("" if node.id == OWN_NODE else f" of {node.name}")
    usage = _switch(tx, request, slot_id, what)
    return {"slot": _slots(usage, node)[str(index_of(slot_id))]}


@reads
def list_pools(connection: Connection, request: ApiRequest) -> dict[str, Any]:
    services = request.services
    usage = _read_usage(connection, devices_of(request.services))
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
        stats=message(
            bindings.v1QueueStats,
            queuedCount=usage.num_queued,
            scheduledCount=len({row.experiment_id for row in usage.allocations}),
        ),
        resourceManagerMetadata={},
        clusterName="",
        minAgents=0,
        maxAgents=0,
        maxAgentStartingPeriod=0.0,
        maxIdleAgentPeriod=0.0,
        **dict.fromkeys(_CLOUD_FIELDS, ""),
    )
    pools, pagination = request.page([pool])
    return {"resourcePools": pools, "pagination": pagination}


async def list_bindings(request: ApiRequest) -> dict[str, Any]:
    asked, pool_name = request.path_params["pool"], request.services.settings.pool_name
    if asked != pool_name:
        raise RequestError(
            404,
            f"resource pool {shown(asked)} does not exist; expected {pool_name!r}, the only one. Name that one.",
        )
    pagination = request.page_of(0).to_json()
    return message(bindings.v1ListWorkspacesBoundToRPResponse, workspaceIds=[], pagination=pagination)


routes = [
    route("GET", "/agents", list_agents, access=USER),
    *(
        route("POST", f"/agents/{{agent_id}}{path}/{verb}", handler, access=ADMIN)
        for path, handler in (("", switch_agent), ("/slots/{slot_id}", switch_slot))
        for verb in ("enable", "disable")
    ),
    route("GET", "/resource-pools", list_pools, access=USER),
    route("GET", "/resource-pools/{pool}/workspace-bindings", list_bindings, access=USER),
]
