"""The master's HTTP application: every route of every resource, behind one frame."""

from __future__ import annotations

from dstrial.master import web
from dstrial.master.api import (
    absent_tasks,
    access_tokens,
    agents,
    allocations,
    auth,
    checkpoints,
    commands,
    detached,
    experiment_actions,
    experiment_checkpoints,
    experiments,
    generic_tasks,
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
    tensorboards,
    trials,
    users,
    webhooks,
    workspaces,
)
from dstrial.master.api.frame import Api, Route
from dstrial.master.proxy import Front
from dstrial.master.services import Services

_MODULES = (
    absent_tasks,
    access_tokens,
    agents,
    allocations,
    auth,
    checkpoints,
    commands,
    detached,
    experiment_actions,
    experiment_checkpoints,
    experiments,
    generic_tasks,
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
    tensorboards,
    trials,
    users,
    webhooks,
    workspaces,
    web,
)


def all_routes() -> list[Route]:
    """Return every route that the master answers."""
    return [route for module in _MODULES for route in module.routes]


def create_app(services: Services) -> Front:
    """Return the ASGI application of a master."""
    return Front(services, Api(services, all_routes()))
