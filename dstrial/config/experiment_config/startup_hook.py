"""What tasks install before they run: requirements and the startup hook. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import dstrial_section

HOOK_NAME = "startup-hook.sh"

_INSTALLERS = re.compile(r"\b(?:pip3?(?:\.\d+)?|uv|poetry|easy_install|setup\.py)\b")
_INSTALLING = re.compile(r"\b(?:install|develop|sync|easy_install)\b")


def requirements_of(config: Mapping[str, Any]) -> str | None:
    """Return a config's requirements file, relative to the model definition."""
    name = _named(config)[1]
    return name if isinstance(name, str) else None


def _named(config: Mapping[str, Any]) -> tuple[str, Any]:
    environment = config.get("environment")
    if isinstance(environment, Mapping) and environment.get("requirements"):
        return "environment.requirements", environment["requirements"]
    return "data.dstrial.requirements", dstrial_section(config).get("requirements")


def may_install(text: str) -> bool:
    """Say whether shell lines look as if they installed packages."""
    return _INSTALLERS.search(text) is not None and _INSTALLING.search(text) is not None


def check_startup(raw: dict[str, Any], context_dir: Path, findings: Diagnostics) -> None:
    """Check a config's requirements; delete the key from ``raw`` if it is empty."""
    if raw["environment"].get("requirements") is None:
        # Clients compare configs with what Determined's master fills in.
        raw["environment"].pop("requirements", None)
    key, name = _named(raw)
    other = dstrial_section(raw).get("requirements")
    if key.startswith("environment") and other is not None and other != name:
        findings.problem(
            "data.dstrial.requirements", render(other), f"{render(name)}, as in {key}", "Keep one of the two."
        )
    if name is not None and (
        not isinstance(name, str) or name.startswith("/") or ".." in PurePosixPath(name).parts
    ):
        findings.problem(
            key, render(name), "a path in the model definition", "Write requirements.txt, for example."
        )
    elif name is not None and context_dir.is_dir() and not (context_dir / name).is_file():
        findings.problem(
            key,
            f"{render(name)}, which is not there",
            "a file of the model definition",
            "Add it, or correct the name.",
        )
