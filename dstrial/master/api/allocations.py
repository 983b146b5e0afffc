"""Allocations: what Determined's harness asks and says about its own process."""

from __future__ import annotations

import asyncio
from typing import Any

from dstrial.master.http.router import TRIAL, ApiRequest, route
from dstrial.master.lifecycle import allocations
from dstrial.master.store import allocations as allocation_rows

_MAX_WAIT_S = 600


async def preemption_signal(request: ApiRequest) -> dict[str, Any]:
    """Answer once the allocation is to stop, or after the timeout."""
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
    allocation_id = request.path_params["allocation_id"]
    await request.services.write(lambda tx: allocations.acknowledge_preemption(tx, allocation_id))
    return {}


_ONE = "/allocations/{allocation_id}"
routes = [
    route("GET", f"{_ONE}/signals/preemption", preemption_signal, access=TRIAL),
    route("POST", f"{_ONE}/signals/ack_preemption", acknowledge_preemption, access=TRIAL),
]
