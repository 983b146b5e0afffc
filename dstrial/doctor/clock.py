"""This machine's clock: its date, jumps, and what keeps it right."""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import struct
import time

from dstrial.doctor.finding import Finding, note, ok, problem

_EARLIEST = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
"""Before the first release of dstrial no clock is right."""

_UNSYNCHRONISED = 0x40
_STATUS_OFFSET = 40 if struct.calcsize("l") == 8 else 20
_STEP_S = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """What was read of the clocks.

    Attributes:
        now: the date, with the time zone.
        stepped_s: by how much it was set forward (or back) while the command looked.
        is_synchronised: whether a time server keeps it right, as the kernel knows; None if it does not say.
    """

    now: datetime.datetime
    stepped_s: float
    is_synchronised: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class Instant:
    """Both clocks at the same instant, seconds."""

    wall_s: float
    monotonic_s: float

    @classmethod
    def now(cls) -> Instant:
        """Read both."""
        return cls(time.time(), time.monotonic())


def measure(began: Instant) -> Clock:
    """Read the clocks; ``began`` has both at the start of the command."""
    now = Instant.now()
    return Clock(
        now=datetime.datetime.now().astimezone(),
        stepped_s=(now.wall_s - began.wall_s) - (now.monotonic_s - began.monotonic_s),
        is_synchronised=_is_synchronised(),
    )


def _is_synchronised() -> bool | None:
    """Ask the kernel, changing nothing, as no mode is set.

    Source: ``man 2 adjtimex`` (``struct timex``, STA_UNSYNC).
    """
    buffer = ctypes.create_string_buffer(512)
    try:
        outcome = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if outcome < 0:
        return None
    status: int = struct.unpack_from("i", buffer.raw, _STATUS_OFFSET)[0]
    return not status & _UNSYNCHRONISED


def judge(clock: Clock) -> list[Finding]:
    """Judge the clock."""
    shown = clock.now.strftime("%Y-%m-%d %H:%M:%S %z").strip()
    if clock.now < _EARLIEST:
        return [
            problem(
                "date",
                f"{shown}, before this release was made",
                "Set the clock: tokens of the master expire at once, and TLS connections fail.",
            )
        ]
    if abs(clock.stepped_s) > _STEP_S:
        return [
            note(
                "date",
                f"{shown}; it was set by {clock.stepped_s:+.1f} s in these seconds",
                "Let a time server slew it; durations in logs and lifetimes of tokens are wrong where it jumps.",
            )
        ]
    kept = {
        True: "kept by a time server",
        False: "kept by no time server that the kernel knows of, which matters between machines only",
        None: "the kernel does not say whether a time server keeps it",
    }[clock.is_synchronised]
    return [ok("date", f"{shown}; {kept}")]
