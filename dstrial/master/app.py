"""Assemble the master's ASGI application from all routes and middleware."""

from __future__ import annotations

import importlib
import pkgutil

from dstrial.master import api, web
from dstrial.master.http.router import Api, Route
from dstrial.master.proxy import ProxyMiddleware
from dstrial.master.services import Services


def all_routes() -> list[Route]:
    """Return the routes of all modules in ``api`` and ``web``."""
    names = [
        name
        for package in (api, web)
        for name in sorted(
            module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        )
    ]
    return [route for name in names for route in getattr(importlib.import_module(name), "routes", ())]


def create_app(services: Services) -> ProxyMiddleware:
    return ProxyMiddleware(services, Api(services, all_routes()))
