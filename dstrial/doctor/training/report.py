"""A run's JSON, rewritten after every check, and its report in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from dstrial.doctor.training.check import Check, Result, Status
from dstrial.file_writes import replace_file
from dstrial.local.json_files import write_json_atomically

_MAX_VALUE_CHARACTERS = 300


def markdown(value: Mapping[str, Any]) -> str:
    """Return the report.

    Args:
        value: JSON value of a run, see ``Record``.
    """
    return "\n".join(_lines(value)).rstrip() + "\n"


def _lines(value: Mapping[str, Any]) -> Iterator[str]:
    yield "# Training checks"
    yield ""
    yield headline(value)
    yield ""
    yield from _table_of_checks(value)
    yield from _failures(value)
    yield from _not_shown(value)
    yield from _environment(value)
    yield from _facts(value)


def headline(value: Mapping[str, Any]) -> str:
    """Return one line with the counts."""
    counts = value.get("counts") or {}
    told = (
        ", ".join(f"{number} {name}" for name, number in counts.items() if number) or "nothing has ended yet"
    )
    seconds = sum(float(check["seconds"]) for check in value["checks"])
    rest = len(value["planned"]) - len(value["checks"])
    more = f" {rest} of {len(value['planned'])} are still to come." if rest else ""
    return f"{told}; {seconds:.0f} s of {value['minutes']:g} minutes, begun at {value['began_at']}.{more}"


def _table_of_checks(value: Mapping[str, Any]) -> Iterator[str]:
    yield "| check | status | s | found |"
    yield "|---|---|---|---|"
    for check in value["checks"]:
        yield f"| {check['name']} | {check['status']} | {check['seconds']:.1f} | {_cell(check['summary'])} |"
    yield ""


def _failures(value: Mapping[str, Any]) -> Iterator[str]:
    failed = [check for check in value["checks"] if check["status"] == "failed"]
    if not failed:
        return
    yield "## What failed"
    yield ""
    for check in failed:
        yield f"### {check['name']}: {check['title']}"
        yield ""
        yield check["summary"]
        yield ""
        if check["advice"]:
            yield f"To do: {check['advice']}"
            yield ""
        if check["output"]:
            yield from ["```", check["output"].replace("```", "'''"), "```", ""]


def _not_shown(value: Mapping[str, Any]) -> Iterator[str]:
    missing = [check for check in value["checks"] if check["not_shown"]]
    advised = [check for check in value["checks"] if check["advice"] and check["status"] != "failed"]
    if not (missing or advised):
        return
    yield "## What was not shown here"
    yield ""
    for check in missing:
        yield f"- {check['name']}: {check['not_shown']}"
    for check in advised:
        yield f"- {check['name']}: {check['advice']}"
    yield ""


def _environment(value: Mapping[str, Any]) -> Iterator[str]:
    if not value["environment"]:
        return
    yield "## The machine"
    yield ""
    yield from _pairs(value["environment"])
    yield ""


def _facts(value: Mapping[str, Any]) -> Iterator[str]:
    shown = [check for check in value["checks"] if check["facts"] and check["name"] != "environment"]
    if not shown:
        return
    yield "## Figures"
    yield ""
    for check in shown:
        yield f"### {check['name']}: {check['title']}"
        yield ""
        yield from _pairs(check["facts"])
        yield ""


def _pairs(facts: Mapping[str, Any]) -> Iterator[str]:
    plain = {name: one for name, one in facts.items() if not _is_table(one)}
    if plain:
        yield "| | |"
        yield "|---|---|"
        for name, one in plain.items():
            yield f"| {_cell(name)} | {_cell(_told(one))} |"
    for name, one in facts.items():
        if _is_table(one):
            yield from _table(name, one)


def _is_table(one: Any) -> bool:
    return isinstance(one, list) and bool(one) and all(isinstance(row, dict) for row in one)


def _table(name: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    yield ""
    yield f"{name}:"
    yield ""
    yield "| " + " | ".join(map(_cell, columns)) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(_cell(_told(row.get(column, ""))) for column in columns) + " |"


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _cell(text: str) -> str:
    whole = " ".join(str(text).replace("|", "\\|").split())
    return whole if len(whole) <= _MAX_VALUE_CHARACTERS else whole[: _MAX_VALUE_CHARACTERS - 1] + "…"


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
        replace_file(self.report_path, markdown(self._value))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
