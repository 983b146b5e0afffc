"""Allocations: what Determined's harness asks and says about its own process."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from determined.common.api import bindings

from dstrial.errors import RequestError
from dstrial.master.api.tasks import allocation_json
from dstrial.master.http.messages import message
from dstrial.master.http.router import TRIAL, ApiRequest, route
from dstrial.master.lifecycle import allocations
from dstrial.master.store import allocations as allocation_rows

_MAX_WAIT_S = 600
_MAX_ACCELERATORS = 1024
_MAX_NAME = 256


async def show_allocation(request: ApiRequest) -> dict[str, Any]:
    """``GET allocations/{id}``."""
    row = await request.services.read(allocation_rows.require, request.path_params["allocation_id"])
    return {"allocation": allocation_json(row)}


async def report_accelerators(request: ApiRequest) -> dict[str, Any]:
    """``POST allocations/{id}/acceleratorData``: what one of its containers has."""
    allocation_id, body, services = request.path_params["allocation_id"], request.body(), request.services
    row = await services.read(allocation_rows.require, allocation_id)
    given = body.fields("acceleratorData") or body
    uuids = given.texts("acceleratorUuids") or []
    found = allocation_rows.Accelerators(
        allocation_id,
        given.text("containerId") or row.resources_id,
        given.text("nodeName") or services.agent_of(row),
        given.text("acceleratorType") or "",
        json.dumps(uuids),
    )
    names = (found.container_id, found.node_name, found.type, *uuids)
    if len(uuids) > _MAX_ACCELERATORS or any(len(one) > _MAX_NAME for one in names):
        raise given.wrong(
            "acceleratorUuids",
            f"at most {_MAX_ACCELERATORS}, and no name of more than {_MAX_NAME} characters",
        )
    await services.write(lambda tx: allocation_rows.note_accelerators(tx, found))
    return {}


async def rendezvous(request: ApiRequest) -> dict[str, Any]:
    """``GET allocations/{id}/resources/{r}/rendezvous``: of one machine, so at once."""
    allocation_id = request.path_params["allocation_id"]
    row = await request.services.read(allocation_rows.require, allocation_id)
    await request.services.write(lambda tx: allocations.mark_ready(tx, allocation_id))
    info = message(
        bindings.v1RendezvousInfo, addresses=["127.0.0.1"], rank=0, slots=[len(json.loads(row.slots))]
    )
    return {"rendezvousInfo": info}


async def preemption_signal(request: ApiRequest) -> dict[str, Any]:
    """``GET allocations/{id}/signals/preemption``: held until it comes, or a timeout."""
    allocation_id = request.path_params["allocation_id"]
    timeout_s = request.query_int("timeout_seconds")
    if timeout_s is None:
        timeout_s = request.query_int("timeoutSeconds") or 0
    services = request.services
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + min(max(timeout_s, 0), _MAX_WAIT_S)
    topic = f"allocation:{allocation_id}"
    while True:
        seen = services.pubsub.version(topic)
        row = await services.read(allocation_rows.require, allocation_id)
        if not row.is_ready:
            await services.write(lambda tx: allocations.mark_ready(tx, allocation_id))
            continue
        is_asked = row.preempt_us is not None or row.state == "TERMINATED"
        left_s = deadline_s - loop.time()
        if is_asked or left_s <= 0:
            return {"preempt": is_asked}
        await services.pubsub.wait(topic, seen, left_s)


async def acknowledge_preemption(request: ApiRequest) -> dict[str, Any]:
    """``POST allocations/{id}/signals/ack_preemption``: the trial has seen the signal."""
    allocation_id = request.path_params["allocation_id"]
    await request.services.write(lambda tx: allocations.acknowledge_preemption(tx, allocation_id))
    return {}


async def pending_preemption(request: ApiRequest) -> dict[str, Any]:
    """``POST allocations/{id}/signals/pending_preemption``: its machine will stop it."""
    await request.services.read(allocation_rows.require, request.path_params["allocation_id"])
    return {}


async def mark_ready(request: ApiRequest) -> dict[str, Any]:
    """``POST allocations/{id}/ready``."""
    allocation_id = request.path_params["allocation_id"]
    await request.services.write(lambda tx: allocations.mark_ready(tx, allocation_id))
    return {}


async def mark_waiting(request: ApiRequest) -> dict[str, Any]:
    """``POST allocations/{id}/waiting``: nothing waits for a trial."""
    await request.services.read(allocation_rows.require, request.path_params["allocation_id"])
    return {}


async def all_gather(request: ApiRequest) -> dict[str, Any]:
    """``POST allocations/{id}/all_gather``: there is one process to gather from."""
    await request.services.read(allocation_rows.require, request.path_params["allocation_id"])
    body = request.body()
    if (body.integer("numPeers") or 1) != 1:
        raise RequestError(
            400, "numPeers is above 1; expected 1 on one machine. Start one launcher per trial."
        )
    return {"data": [body.get("data")]}


_ONE = "/allocations/{allocation_id}"
routes = [
    route("GET", _ONE, show_allocation, access=TRIAL),
    route("POST", f"{_ONE}/acceleratorData", report_accelerators, access=TRIAL),
    route("GET", f"{_ONE}/resources/{{resources_id}}/rendezvous", rendezvous, access=TRIAL),
    route("GET", f"{_ONE}/signals/preemption", preemption_signal, access=TRIAL),
    route("POST", f"{_ONE}/signals/ack_preemption", acknowledge_preemption, access=TRIAL),
    route("POST", f"{_ONE}/signals/pending_preemption", pending_preemption, access=TRIAL),
    route("POST", f"{_ONE}/ready", mark_ready, access=TRIAL),
    route("POST", f"{_ONE}/waiting", mark_waiting, access=TRIAL),
    route("POST", f"{_ONE}/all_gather", all_gather, access=TRIAL),
    route("POST", f"{_ONE}/proxy_address", mark_waiting, access=TRIAL),
    route("POST", f"{_ONE}/notify_container_running", mark_waiting, access=TRIAL),
]
