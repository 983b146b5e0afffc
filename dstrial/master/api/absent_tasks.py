"""Notebooks and shells, of which there are none: their lists are empty, and ``not_offered`` refuses the rest."""

from __future__ import annotations

from typing import Any

from dstrial.master.api.frame import USER, ApiRequest, route
from dstrial.master.api.messages import page_of


async def list_notebooks(request: ApiRequest) -> dict[str, Any]:
    """``GET notebooks``."""
    return {"notebooks": [], "pagination": _none(request)}


async def list_shells(request: ApiRequest) -> dict[str, Any]:
    """``GET shells``."""
    return {"shells": [], "pagination": _none(request)}


def _none(request: ApiRequest) -> dict[str, int]:
    return page_of(0, request.query_int("offset"), request.query_int("limit")).to_json()


routes = [
    route("GET", "/notebooks", list_notebooks, access=USER),
    route("GET", "/shells", list_shells, access=USER),
]
