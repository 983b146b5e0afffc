"""How the ranks of one launch ended, as a value and as a file; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dstrial.launch.failures import RankFailure


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How the ranks of one launch ended.

    Attributes:
        exit_code: 0 only if every rank exited 0; 130 after a second Ctrl-C; else that of the first failing
            rank, or of one that had to be ended (128 + n for signal n).
        first_failure: the failure that caused the others; None if no rank failed by itself.
        exit_codes: by local rank, as a shell sees them.
        stopped_by: name of the signal that asked for a stop, None if none did.
        killed_ranks: global ranks that did not end by themselves in time and were killed.
        ended_at_once: whether a second Ctrl-C ended the ranks.
    """

    exit_code: int
    first_failure: RankFailure | None
    exit_codes: tuple[int, ...]
    stopped_by: str | None
    killed_ranks: tuple[int, ...]
    ended_at_once: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LaunchOutcome:
        """Return what ``to_json`` was called on."""
        failure = fields["first_failure"]
        return cls(
            exit_code=fields["exit_code"],
            first_failure=None if failure is None else RankFailure(**failure),
            exit_codes=tuple(fields["exit_codes"]),
            stopped_by=fields["stopped_by"],
            killed_ranks=tuple(fields["killed_ranks"]),
            ended_at_once=fields["ended_at_once"],
        )
