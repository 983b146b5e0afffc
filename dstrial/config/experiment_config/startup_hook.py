"""What tasks install before they run: requirements and the startup hook. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.dotted_keys import dstrial_section

HOOK_NAME = "startup-hook.sh"
DEFAULT_INSTALL_TIMEOUT_S = 1800.0

# Of a longer hook the rest is not looked at, and of a longer line: patterns take the square of a line's length.
_MAX_HOOK_CHARS = 1 << 16
_MAX_LINE_CHARS = 2000
_INSTALLERS = re.compile(r"\b(?:pip3?(?:\.\d+)?|uv|poetry|easy_install|setup\.py)\b")
_INSTALLING = re.compile(r"\b(?:install|develop|sync|easy_install)\b")
_PIP = re.compile(r"\bpip3?(?:\.\d+)?\s+(?:\S+\s+)*?(?:install|uninstall)\b(?P<words>[^;&|#]*)")
_ELSEWHERE = re.compile(r"(?<!\S)(--user|--target|--prefix|--root|-t)(?=[\s=]|$)")
_UV = re.compile(r"\buv\s+(?:pip\s+(?:install|sync)|sync|add)\b")
_CHANGES = r"(?:install|create|update|upgrade|remove|uninstall|purge|build-dep|dist-upgrade)"
_MANAGER = re.compile(
    rf"\b(?P<name>conda|mamba|micromamba|apt|apt-get|yum|dnf|apk|brew)\s+(?:\S+\s+)*?{_CHANGES}\b"
)


def requirements_of(config: Mapping[str, Any]) -> str | None:
    """Return a config's requirements file, relative to the model definition."""
    name = _named(config)[1]
    return name if isinstance(name, str) else None


def _named(config: Mapping[str, Any]) -> tuple[str, Any]:
    environment = config.get("environment")
    if isinstance(environment, Mapping) and environment.get("requirements"):
        return "environment.requirements", environment["requirements"]
    return "data.dstrial.requirements", dstrial_section(config).get("requirements")


def install_timeout_s(config: Mapping[str, Any]) -> float:
    given = dstrial_section(config).get("install_timeout_s")
    return float(given) if given is not None and _is_time(given) else DEFAULT_INSTALL_TIMEOUT_S


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 10**9


def may_install(text: str) -> bool:
    """Say whether shell lines look as if they installed packages."""
    return _INSTALLERS.search(text) is not None and _INSTALLING.search(text) is not None


def check_startup(raw: dict[str, Any], context_dir: Path, findings: Diagnostics) -> None:
    """Check a config's installations; warn of what a startup hook cannot do here."""
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
    timeout = dstrial_section(raw).get("install_timeout_s")
    if timeout is not None and not _is_time(timeout):
        findings.problem(
            "data.dstrial.install_timeout_s",
            render(timeout),
            "a number of seconds above 0",
            "Write 1800, for example.",
        )
    hook = context_dir / HOOK_NAME
    if hook.is_file():
        with hook.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_HOOK_CHARS)
        for line, what, fix in unsupported(text):
            findings.warnings.append(f"{HOOK_NAME}:{line}: {what} is not supported: {fix}")


def unsupported(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, text and remedy of each line that cannot do what it says."""
    for number, raw_line in enumerate(text.replace("\\\n", " ").splitlines(), 1):
        line = re.sub(r"(^|\s)#.*", "", raw_line[:_MAX_LINE_CHARS])
        manager = _MANAGER.search(line)
        if manager is not None:
            yield (
                number,
                manager.group("name"),
                "it would change this machine, or an environment that others use. Install what it names once by hand, or "
                "use pip, which installs into an environment of this trial's own",
            )
        if _UV.search(line) is not None:
            yield number, "uv", "it does not see the packages that are there already. Use pip"
        for found in _PIP.finditer(line):
            option = _ELSEWHERE.search(found.group("words"))
            if option is not None:
                yield (
                    number,
                    f"pip install {option.group(1)}",
                    "a plain pip install goes into an environment of this trial's own. Remove the option",
                )
