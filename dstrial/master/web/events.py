"""Server-sent events for the page: topics of changed experiments, trials and logs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dstrial.master.http.responses import Stream, event_stream
from dstrial.master.http.router import USER, ApiRequest, route
from dstrial.master.services import Services

_GAP_S = 0.5  # minimum time between events; changes within it are batched
_PING_S = 15.0
_MAX_TOPICS = 500
_PREFIXES = ("experiment:", "trial:", "metrics:", "logs:", "command:", "job:")
_WORDS = ("scheduler", "webhooks", "webhook_events", "webhook_results", "models")


def is_shown(topic: str) -> bool:
    return topic.startswith(_PREFIXES) or topic in _WORDS


async def _events(services: Services) -> AsyncIterator[dict[str, Any] | None]:
    with services.pubsub.follow(is_shown) as follower:
        yield {"master": services.master_id}
        while True:
            topics = await follower.next(_PING_S)
            if not topics:
                yield None
                continue
            yield {"topics": sorted(topics)} if len(topics) <= _MAX_TOPICS else {"all": True}
            await asyncio.sleep(_GAP_S)


async def get_events(request: ApiRequest) -> Stream:
    """Stream server-sent events.

    The first is ``{"master": id}``, with a new id after a restart. Changes follow as ``{"topics": […]}``, or ``{"all": true}`` if
    there are too many.
    """
    return event_stream(_events(request.services))


routes = [route("GET", "//page/events", get_events, access=USER)]
