"""Rejects configs that the engine (Slurm, Ray) could never run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dstrial.master.backends.backend import ResourceRequest

if TYPE_CHECKING:
    from dstrial.config.diagnostics import Diagnostics
    from dstrial.master.services import Services

SLOTS_KEY = "resources.slots_per_trial"  # the key under which back ends report an unsatisfiable slot count


async def refuse_unsatisfiable(
    services: Services, request: ResourceRequest | None, findings: Diagnostics, *, slots_key: str = SLOTS_KEY
) -> None:
    """Raise ``ConfigError`` if the engine could never run the requested job.

    ``request`` is None without slots; ``slots_key`` is the config key of the slot count.

    Raises:
        ConfigError: with the engine's reasons.
    """
    if services.engine is None or request is None:
        return
    # Not in the services' thread pool: this may take seconds, and the pool is for short calls.
    for one in await asyncio.to_thread(services.backend.unsatisfiable_reasons, request):
        findings.problem(slots_key if one.key == SLOTS_KEY else one.key, one.got, one.expected, one.fix)
    findings.raise_if_any()
