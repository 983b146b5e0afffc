"""The result of a check: a status, one line of text, and what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

# ok: works. note: works, with a remark. problem: some trainings fail.
Status = Literal["ok", "note", "problem"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One output line of ``dstrial doctor``."""

    name: str  # a few words, stable between versions
    status: Status
    what: str  # without a full stop
    todo: str = ""  # sentences with full stops; empty if there is nothing to do


def ok(name: str, what: str) -> Finding:
    return Finding(printable(name), "ok", printable(what))


def note(name: str, what: str, todo: str) -> Finding:
    return Finding(printable(name), "note", printable(what), printable(todo))


def problem(name: str, what: str, todo: str) -> Finding:
    return Finding(printable(name), "problem", printable(what), printable(todo))


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The findings of one check."""

    name: str
    seconds: float
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seconds": round(self.seconds, 3)}


def count(groups: Iterable[Group]) -> dict[Status, int]:
    counts: dict[Status, int] = {"ok": 0, "note": 0, "problem": 0}
    for group in groups:
        for finding in group.findings:
            counts[finding.status] += 1
    return counts


def printable(text: str) -> str:
    """Replace control characters, which process names may contain."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
