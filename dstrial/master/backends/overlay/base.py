"""What a base has: package directories, packages, and which of them must stay."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import site
import sys
from importlib import metadata
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

KEPT = ("torch", "deepspeed", "determined", "dstrial")
"""Packages that no overlay replaces, not even by another build of the same version."""

_FORMAT = 1
_MAX_FILES = 20_000
# Only such files of a model definition are looked for by their names in a hook's text.
_SUFFIXES = (
    ".txt", ".toml", ".cfg", ".in", ".lock", ".yml", ".yaml", ".sh", ".whl", ".gz", ".zip", ".bz2",
)  # fmt: skip


def site_directories() -> list[str]:
    """Return the running Python's package directories, those of its user last."""
    found = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # Not in a virtual environment, which does not look there either (site.py, venv()).
    if sys.prefix == sys.base_prefix and not os.environ.get("PYTHONNOUSERSITE"):
        user = site.getusersitepackages()
        if Path(user).is_dir():
            found.append(user)
    return found


class Package:
    """A package that is installed."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        self.name = str(distribution.metadata["Name"] or "")
        self.version = str(distribution.version)
        self.requires = tuple(distribution.requires or ())
        self.origin = distribution.read_text("direct_url.json") or ""


def packages(paths: Sequence[str]) -> dict[str, Package]:
    """Return installed packages by canonical name; the first counts, as for imports."""
    found: dict[str, Package] = {}
    for distribution in metadata.distributions(path=list(paths)):
        package = Package(distribution)
        if package.name:
            found.setdefault(canonical(package.name), package)
    return found


def canonical(name: str) -> str:
    """Return the form of a package's name in which names are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def freeze(found: dict[str, Package]) -> list[str]:
    """Return a line per package as ``pip freeze``, with its origin if not an index."""
    return sorted(f"{name}=={package.version} {package.origin}".strip() for name, package in found.items())


def constraints(found: dict[str, Package]) -> dict[str, str]:
    """Return what keeps the base's packages as they are, each with the reason.

    The kept packages stay at their versions. What they require of others, with a version and as it is met in the base,
    holds for an overlay, too: without it they would break.
    """
    lines = {}
    for name in KEPT:
        if name in found:
            lines[f"{found[name].name}=={found[name].version}"] = "the environment of this master"
    try:
        requirements = importlib.import_module("packaging.requirements")
    except ImportError:
        requirements = importlib.import_module("pip._vendor.packaging.requirements")
    for kept in KEPT:
        for text in found[kept].requires if kept in found else ():
            try:
                requirement = requirements.Requirement(text)
            except requirements.InvalidRequirement:
                continue
            has = found.get(canonical(requirement.name))
            is_meant = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if not is_meant or has is None or not requirement.specifier or requirement.url:
                continue
            if requirement.specifier.contains(has.version, prereleases=True) and has.name not in KEPT:
                line = f"{requirement.name}{requirement.specifier}"
                lines.setdefault(line, f"{kept} {found[kept].version}")
    return lines


def digest_of(
    hooks: Iterable[str], requirements: Iterable[str], files: Path, found: dict[str, Package]
) -> str:
    """Return the digest by which tasks share an overlay.

    Args:
        hooks: texts of all hooks and of an entrypoint that installs.
        requirements: files of requirements, relative to ``files``.
        files: the model definition.
        found: what the base has.
    """
    texts = list(hooks)
    value: dict[str, Any] = {
        "format": _FORMAT,
        "hooks": texts,
        "files": sorted(_named_files("\n".join([*texts, *requirements]), files).items()),
        "interpreter": [sys.executable, sys.version],
        "base": freeze(found),
    }
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _named_files(text: str, files: Path) -> dict[str, str]:
    """Return digests of the model's files that a hook names, and that these name."""
    found: dict[str, str] = {}
    by_name: dict[str, list[Path]] = {}
    for path in _files_below(files):
        if path.name.endswith(_SUFFIXES) and path.name != "startup-hook.sh":
            by_name.setdefault(path.name, []).append(path)
    texts = [text]
    while texts:
        words = set(re.split(r"[\s\"'=;&|(){}<>\[\],]+|(?<=^-r)|(?<=^-c)", texts.pop()))
        for word in words:
            for path in by_name.get(word.rpartition("/")[2].removeprefix("-r").removeprefix("-c"), ()):
                name = str(path.relative_to(files))
                if name not in found:
                    found[name] = content_digest(path)
                    if path.suffix in (".txt", ".in", ".sh"):
                        texts.append(path.read_text(encoding="utf-8", errors="replace"))
            directory = files / word
            is_within = word and not word.startswith("/") and ".." not in word.split("/")
            if (
                is_within
                and word not in found
                and (word in (".", "./") or "/" in word)
                and directory.is_dir()
            ):
                found[word] = content_digest(directory)
    return found


def content_digest(path: Path) -> str:
    """Return a digest of a file, or of all files in a directory with their names."""
    digest = hashlib.sha256()
    if path.is_file():
        digest.update(path.read_bytes())
    else:
        for file in _files_below(path):
            digest.update(f"\0{file.relative_to(path)}\0".encode("utf-8", "surrogateescape"))
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _files_below(directory: Path) -> list[Path]:
    found = []
    for parent, names, file_names in os.walk(directory):
        names[:] = sorted(name for name in names if name not in (".git", "__pycache__"))
        found += [Path(parent, name) for name in sorted(file_names) if Path(parent, name).is_file()]
        if len(found) > _MAX_FILES:
            break
    return found
