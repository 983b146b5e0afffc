"""The master's timestamps: integer microseconds since the epoch, or ISO text."""

from __future__ import annotations

import datetime
import time

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_US = datetime.timedelta(microseconds=1)


def now_us() -> int:
    return time.time_ns() // 1000


def format_us(us: int) -> str:
    """Format a timestamp as ``2026-11-21T02:00:00.123456Z``, which sorts by time."""
    # isoformat() pads years before 1000; strftime() does not.
    return f"{(_EPOCH + us * _US).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def parse_time(text: str) -> int:
    """Parse an ISO time (UTC if it has no zone) to microseconds since the epoch.

    Raises:
        ValueError: the text is not an ISO time, or not in the years 1 to 9999.
    """
    from dateutil import parser  # type: ignore[import-untyped]  # no stubs are installed

    found: datetime.datetime = parser.isoparse(text)
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.timezone.utc)
    us = (found - _EPOCH) // _US
    try:
        format_us(us)
    except OverflowError as error:
        raise ValueError(f"{text!r} is not in the years 1 to 9999 of UTC") from error
    return us
