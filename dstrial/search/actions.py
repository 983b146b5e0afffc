"""What a searcher asks for, and how a trial may end."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeAlias


@dataclasses.dataclass(frozen=True, slots=True)
class Create:
    """Start a trial.

    Attributes:
        request_id: the searcher's name of the trial, a version-4 UUID.
        trial_seed: seed of the trial, 0 to 2^31 - 1.
        hparams: concrete value by name, nested mappings kept.
    """

    request_id: str
    trial_seed: int
    hparams: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Ask a trial to save a checkpoint and end; it has trained as long as it should."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Shutdown:
    """The search is over: every trial that was asked for has exited.

    Attributes:
        cancel: every trial was cancelled by a user.
        failure: every trial failed.
    """

    cancel: bool = False
    failure: bool = False


Action: TypeAlias = Create | Stop | Shutdown


class ExitReason(str, enum.Enum):
    """Why a trial ended before its time."""

    ERRORED = "ERRORED"
    USER_CANCELED = "USER_CANCELED"
    INVALID_HP = "INVALID_HP"
