"""The JSON of a run of training checks, whole on disk after every check."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dstrial.doctor.training.check import Check, Result, Status
from dstrial.doctor.training.report import markdown
from dstrial.local.json_files import write_json_atomically, write_text_atomically

JSON_NAME = "result.json"
REPORT_NAME = "report.md"


class Record:
    """What a run has found so far.

    Args:
        directory: where it is kept; must exist.
        minutes: that the run may take.
        planned: names of the checks, in their order.
    """

    def __init__(self, directory: Path, *, minutes: float, planned: tuple[str, ...]) -> None:
        self.directory = directory
        self._value: dict[str, Any] = {
            "version": 1,
            "began_at": _now(),
            "ended_at": None,
            "minutes": minutes,
            "planned": list(planned),
            "running": None,
            "environment": {},
            "counts": {},
            "checks": [],
        }
        self._write()

    @property
    def value(self) -> dict[str, Any]:
        """The JSON value."""
        return self._value

    @property
    def json_path(self) -> Path:
        """The JSON."""
        return self.directory / JSON_NAME

    @property
    def report_path(self) -> Path:
        """The report for people."""
        return self.directory / REPORT_NAME

    def begin(self, check: Check) -> None:
        """Note that a check runs now."""
        self._value["running"] = check.name
        self._write()

    def add(self, result: Result) -> None:
        """Keep a result."""
        self._value["running"] = None
        self._value["checks"].append(result.to_json())
        if result.name == "environment":
            self._value["environment"] = dict(result.facts)
        found = [one["status"] for one in self._value["checks"]]
        self._value["counts"] = {status.value: found.count(status.value) for status in Status}
        self._write()

    def finish(self) -> None:
        """Note that all checks have ended."""
        self._value["ended_at"] = _now()
        self._write()

    def _write(self) -> None:
        write_json_atomically(self.json_path, self._value)
        write_text_atomically(self.report_path, markdown(self._value))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
