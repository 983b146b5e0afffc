"""What a check or one of its programs has found so far, on disk at once, so that nothing is lost when it is ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrial.errors import DstrialError
from dstrial.local.json_files import read_json, write_json_atomically

_PATTERN = "facts-*.json"


class Facts:
    """Names and JSON values in one file, which only one process writes.

    Args:
        path: the file; its directory must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def note(self, **values: Any) -> None:
        """Keep what was found."""
        self._values.update(values)
        write_json_atomically(self._path, self._values, sync=False)


def facts_path(directory: Path, program: str) -> Path:
    """Return the file of one program's facts."""
    return directory / f"facts-{program}.json"


def read_facts(path: Path) -> dict[str, Any]:
    """Return what one program has noted; nothing where the file is not there or not whole."""
    try:
        found = read_json(path)
    except (OSError, DstrialError):
        return {}
    return found if isinstance(found, dict) else {}


def all_facts(directory: Path) -> dict[str, Any]:
    """Return what a check and its programs have noted, together."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob(_PATTERN)):
        found.update(read_facts(path))
    return found
