"""What a training check is and how it ends; values only."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class Status(str, enum.Enum):
    """How a check ended."""

    OK = "ok"
    """It shows what it is there for."""
    FAILED = "failed"
    """Something does not work here; the reason and what to do are told."""
    NOT_APPLICABLE = "not applicable"
    """This machine or this version has nothing of that kind; the reason is told."""
    NOT_REACHED = "not reached"
    """The minutes were up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check, a process of its own.

    Attributes:
        name: for ``--only`` and ``--skip``.
        title: what it shows, in one line.
        module: has ``run(bench) -> Finding``.
        needs_s: it is not begun with fewer seconds left than these.
        deadline_s: seconds after which it is ended as hanging.
        always: whether ``--only`` runs it too, because the report needs what it finds.
    """

    name: str
    title: str
    module: str
    needs_s: float
    deadline_s: float
    always: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What a check that ended well has found.

    Attributes:
        summary: in one line, with the figures that matter.
        not_shown: what this machine cannot show of it; empty where nothing is missing.
    """

    summary: str
    not_shown: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """How a check ended.

    Attributes:
        name: of the check.
        title: of the check.
        status: how.
        summary: what was found, or why it failed, is not applicable or not reached.
        advice: what to do; empty where nothing is.
        not_shown: what this machine cannot show of it.
        seconds: how long it took.
        deadline_s: how long it might have taken.
        facts: name -> JSON value, as far as the check came.
        output: the end of what it printed; empty where it ended well.
    """

    name: str
    title: str
    status: Status
    summary: str
    advice: str = ""
    not_shown: str = ""
    seconds: float = 0.0
    deadline_s: float = 0.0
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    output: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **dataclasses.asdict(self),
            "status": self.status.value,
            "seconds": round(self.seconds, 1),
            "deadline_s": round(self.deadline_s, 1),
        }


class CheckFailedError(Exception):
    """What a check is there to show is not so.

    Args:
        reason: what is wrong.
        advice: what to do.
        output: the end of what a program of the check printed.
    """

    def __init__(self, reason: str, advice: str, output: str = "") -> None:
        super().__init__(reason)
        self.advice = advice
        self.output = output


class NotApplicableError(Exception):
    """A check has nothing to look at here; the message says why.

    Args:
        reason: why.
        advice: what would make it applicable; empty where nothing does.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice
