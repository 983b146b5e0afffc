"""The master's HTTP application: every route of every resource, behind one frame."""

from __future__ import annotations

import importlib
import pkgutil

from dstrial.master import api
from dstrial.master.http.router import Api, Route
from dstrial.master.proxy import ProxyMiddleware
from dstrial.master.services import Services
from dstrial.master.web import page


def all_routes() -> list[Route]:
    """Return the routes of every module of ``api``, and of the page."""
    names = sorted(module.name for module in pkgutil.iter_modules(api.__path__, f"{api.__name__}."))
    modules = [importlib.import_module(name) for name in names]
    return [route for module in (*modules, page) for route in getattr(module, "routes", ())]


def create_app(services: Services) -> ProxyMiddleware:
    """Return the ASGI application of a master."""
    return ProxyMiddleware(services, Api(services, all_routes()))
