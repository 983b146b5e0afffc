"""Compare the interpreter and installed packages with dstrial's requirements."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import dstrial
from dstrial.doctor.finding import Finding, note, ok, problem
from dstrial.errors import install_command

_CHECKOUT = Path(dstrial.__file__).resolve().parents[1]
_FOR_DEVELOPERS = "dev"
_SCRIPT = "dstrial.cli.app:main"


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """One package that dstrial or one of its extras requires."""

    name: str
    versions: str  # supported versions, such as ``>=2.6``; empty for any
    extra: str  # empty for packages that dstrial always needs
    installed: str | None
    is_supported: bool


def check() -> list[Finding]:
    """Return findings on the interpreter, dstrial's installation and its requirements."""
    found = list(importlib.metadata.distributions(name="dstrial"))
    own = [one for one in found if any(script.value == _SCRIPT for script in one.entry_points)]
    python_versions = (own[0].metadata["Requires-Python"] if own else None) or ">=3.10"
    namesakes = [f"{one.version} in {one.locate_file('')}" for one in found if one not in own]
    asked = requirements(own[0].requires or [], installed_versions()) if own else None
    return [
        _check_python(python_versions),
        _judge_dstrial(", ".join(namesakes), is_installed=bool(own)),
        *judge_requirements(asked),
    ]


def requirements(asked: Sequence[str], installed: Mapping[str, str]) -> list[Requirement]:
    """Compare the ``Requires-Dist`` lines ``asked`` with the ``installed`` versions."""
    from packaging.requirements import Requirement as Parsed

    found = []
    for text in asked:
        parsed = Parsed(text)
        extra_word = re.search(r"extra == ['\"]([^'\"]+)['\"]", str(parsed.marker or ""))
        extra = "" if extra_word is None else extra_word[1]
        is_meant = parsed.marker is None or parsed.marker.evaluate({"extra": extra})
        if not is_meant or extra == _FOR_DEVELOPERS or normalized(parsed.name) == "dstrial":
            continue
        version = installed.get(normalized(parsed.name))
        found.append(
            Requirement(
                name=parsed.name,
                versions=str(parsed.specifier),
                extra=extra,
                installed=version,
                is_supported=version is not None and parsed.specifier.contains(version, prereleases=True),
            )
        )
    return found


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()  # PEP 503


def installed_versions() -> dict[str, str]:
    """Return normalised package name -> version of all installed packages."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            # The first copy on the path is imported.
            found.setdefault(normalized(name), distribution.version)
    return found


def _check_python(versions: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    where = "no virtual environment" if sys.prefix == sys.base_prefix else f"virtual environment {sys.prefix}"
    implementation, system = platform.python_implementation(), platform.system()
    what = f"{implementation} {version}, {sys.executable} ({where}), {system}"
    if not SpecifierSet(versions).contains(version, prereleases=True):
        return problem("python", what, f"Make an environment with Python {versions}.")
    if system != "Linux":
        return problem("python", what, "dstrial needs Linux: it follows processes through /proc.")
    return ok("python", what)


def _judge_dstrial(namesakes: str, *, is_installed: bool) -> Finding:
    if namesakes:
        return problem(
            "dstrial",
            f"another package of this name is installed: {namesakes}; ranks may import it",
            f"`{sys.executable} -m pip uninstall dstrial`, then `{install_command()}`.",
        )
    how = "" if is_installed else ", a checkout that is not installed"
    return ok("dstrial", f"{dstrial.__version__}, {_CHECKOUT}{how}")


def judge_requirements(found: Sequence[Requirement] | None) -> list[Finding]:
    if found is None:
        what = "not compared: dstrial is not installed here"
        return [note("packages", what, "`pip install -e .` in the checkout.")]
    needed = [one for one in found if not one.extra]
    fitting = [f"{one.name} {one.installed}" for one in needed if one.is_supported]
    findings = [ok("packages", f"{len(fitting)} of {len(needed)} as supported: {', '.join(fitting)}")]
    for one in needed:
        if not one.is_supported:
            what = f"{one.installed or 'missing'}; expected {one.versions or 'any version'}"
            todo = f"`{sys.executable} -m pip install '{one.name}{one.versions}'`."
            findings.append(problem(one.name, what, todo))
    for extra in dict.fromkeys(one.extra for one in found if one.extra):
        findings.append(_judge_extra(extra, [one for one in found if one.extra == extra]))
    return findings


def _judge_extra(extra: str, wanted: Sequence[Requirement]) -> Finding:
    name = f"extra {extra}"
    there = [one for one in wanted if one.installed is not None]
    if not there:
        missing = ", ".join(one.name for one in wanted)
        return ok(name, f"not installed ({missing}); `{install_command(extra)}` adds it")
    wrong = [one for one in wanted if not one.is_supported]
    if wrong:
        what = ", ".join(
            f"{one.name} {one.installed or 'missing'} (expected {one.versions})" for one in wrong
        )
        return note(name, what, f"`{install_command(extra)}`, if trials use it.")
    return ok(name, ", ".join(f"{one.name} {one.installed}" for one in wanted))
