"""Refuses what an engine rejects, before anything is stored."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dstrial.master.backends.backend import ResourceRequest

if TYPE_CHECKING:
    from dstrial.config.diagnostics import Diagnostics
    from dstrial.master.services import Services

SLOTS_KEY = "resources.slots_per_trial"  # Where a back end's refusals say how many slots are asked for


async def refuse_unsatisfiable(
    services: Services, request: ResourceRequest | None, findings: Diagnostics, *, slots_key: str = SLOTS_KEY
) -> None:
    """Refuse a config whose jobs the engine rejects.

    ``request`` is None without slots; ``slots_key`` is where the config says how many slots it asks for.

    Raises:
        ConfigError: with what the engine says.
    """
    if services.engine is None or request is None:
        return
    # In a thread of its own kind: it may take seconds, and the others are for what takes none.
    for one in await asyncio.to_thread(services.backend.unsatisfiable_reasons, request):
        findings.problem(slots_key if one.key == SLOTS_KEY else one.key, one.got, one.expected, one.fix)
    findings.raise_if_any()
