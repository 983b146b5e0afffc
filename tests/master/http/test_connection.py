"""The installed uvicorn has the undocumented names that the master uses."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[3]


def test_uvicorn_upper_bound_follows_installed_release() -> None:
    """``pyproject.toml`` must not admit a release that was not tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirement = next(one for one in map(Requirement, project["dependencies"]) if one.name == "uvicorn")
    installed = Version(importlib.metadata.version("uvicorn"))

    assert installed in requirement.specifier
    assert f"{installed.major}.{installed.minor + 1}" not in requirement.specifier


def test_only_connection_module_imports_uvicorn_protocols() -> None:
    found = [
        path.name for path in (ROOT / "dstrial").rglob("*.py") if "uvicorn.protocols" in path.read_text()
    ]

    assert found == ["connection.py"]


def test_uvicorn_protocol_has_names_used_by_connection() -> None:
    config = uvicorn.Config(Starlette(), limit_concurrency=3, log_config=None)
    state = uvicorn.Server(config).server_state
    loop = SimpleNamespace()

    protocol = H11Protocol(config, state, {}, loop)  # type: ignore[arg-type]  # the protocol only stores it

    assert (protocol.connections, protocol.limit_concurrency) == (state.connections, 3)
    assert (protocol.loop, protocol.transport) == (loop, None)
    for name in ("connection_made", "connection_lost", "on_response_complete", "handle_websocket_upgrade"):
        assert callable(getattr(H11Protocol, name))
