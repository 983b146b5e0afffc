"""The master's HTTP application: every route of every resource, behind one frame."""

from __future__ import annotations

from dstrial.master import web
from dstrial.master.api import (
    agents,
    allocations,
    auth,
    checkpoints,
    experiment_actions,
    experiment_checkpoints,
    experiments,
    jobs,
    logs,
    master,
    metrics,
    models,
    preview,
    projects,
    resources,
    runs,
    tasks,
    templates,
    trials,
    users,
    workspaces,
)
from dstrial.master.api.frame import Api, Route
from dstrial.master.services import Services

_MODULES = (
    agents,
    allocations,
    auth,
    checkpoints,
    experiment_actions,
    experiment_checkpoints,
    experiments,
    jobs,
    logs,
    master,
    metrics,
    models,
    preview,
    projects,
    resources,
    runs,
    tasks,
    templates,
    trials,
    users,
    workspaces,
    web,
)


def all_routes() -> list[Route]:
    """Return every route that the master answers."""
    return [route for module in _MODULES for route in module.routes]


def create_app(services: Services) -> Api:
    """Return the ASGI application of a master."""
    return Api(services, all_routes())
