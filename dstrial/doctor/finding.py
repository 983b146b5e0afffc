"""What a check has found: one line with a status, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

Status = Literal["ok", "note", "problem"]
"""``ok``: works. ``note``: works, with something to know. ``problem``: some training fails because of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``dstrial doctor``.

    Attributes:
        name: what was looked at, a few words that stay the same between versions.
        status: whether it is as training needs it.
        what: what was found, without a full stop.
        todo: sentences that mend it, with their full stops; empty if nothing is to be done.
    """

    name: str
    status: Status
    what: str
    todo: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the finding as ``--json`` writes it."""
        return dataclasses.asdict(self)


def ok(name: str, what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(printable(name), "ok", printable(what))


def note(name: str, what: str, todo: str) -> Finding:
    """Return a finding that a person should know of; training works."""
    return Finding(printable(name), "note", printable(what), printable(todo))


def problem(name: str, what: str, todo: str) -> Finding:
    """Return a finding because of which some training fails."""
    return Finding(printable(name), "problem", printable(what), printable(todo))


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The findings of one check, under one heading.

    Attributes:
        name: the heading.
        findings: in the order in which they are shown.
    """

    name: str
    seconds: float
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the group as ``--json`` writes it."""
        return {
            "name": self.name,
            "seconds": round(self.seconds, 3),
            "findings": [finding.to_json() for finding in self.findings],
        }


def count(groups: Iterable[Group]) -> dict[Status, int]:
    """Return how many findings there are of each status."""
    counts: dict[Status, int] = {"ok": 0, "note": 0, "problem": 0}
    for group in groups:
        for finding in group.findings:
            counts[finding.status] += 1
    return counts


def in_words(counts: dict[Status, int]) -> str:
    """Say counts as in ``12 ok, 2 notes, 1 problem``."""
    return f"{counts['ok']} ok, {plural(counts['note'], 'note')}, {plural(counts['problem'], 'problem')}"


def printable(text: str) -> str:
    """Return a text with every character that is not for reading written as its code.

    Names of processes, of hosts and values of variables are chosen by others, and hold what moves a terminal's cursor if
    those want it; bytes that are no UTF-8 cannot be written at all.
    """
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def plural(count: int, noun: str) -> str:
    """Write a number with its noun: ``1 device``, ``2 devices``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(num_bytes: float) -> str:
    """Write a number of bytes for people: ``1.5 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB" if value < 1000 else f"{value:,.0f} TiB"
