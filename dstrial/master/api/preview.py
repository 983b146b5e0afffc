"""What a search would do, before it is submitted."""

from __future__ import annotations

from typing import Any

from determined.common.api import bindings

from dstrial.config.secrets import masked
from dstrial.config.submission import search_section
from dstrial.master.api.frame import USER, ApiRequest, route
from dstrial.master.api.messages import message
from dstrial.search import PreviewedTrials, preview


async def preview_search(request: ApiRequest) -> dict[str, Any]:
    """``POST preview-hp-search``: how many trials train how long, from the config alone."""
    body = request.body()
    config = body.mapping("config")
    if config is None:
        raise body.wrong("config", "an experiment config")
    limits = request.services.settings.limits
    summary = await request.services.check(lambda: preview(search_section(config, limits)))
    return message(
        bindings.v1PreviewHPSearchResponse,
        summary=message(
            bindings.v1SearchSummary,
            config=masked(summary.config, request.services.secret_names),
            trials=[_trials(trials) for trials in summary.trials],
        ),
    )


def _trials(trials: PreviewedTrials) -> dict[str, Any]:
    unit = message(
        bindings.v1SearchUnit, maxLength=trials.value is None, name=trials.unit, value=trials.value
    )
    return message(bindings.v1TrialSummary, count=trials.count, unit=unit)


routes = [route("POST", "/preview-hp-search", preview_search, access=USER)]
