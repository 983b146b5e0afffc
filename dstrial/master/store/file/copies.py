"""Copies of the database: where they lie, their names, which of them go.

Opens no database.

``<state dir>/backups/`` holds ``daily-DATE-TIME.db``, of which the newest are kept, and ``master-DATE-TIME.db``, which a person
has asked for and which stays. Beside each lies ``….db.json`` (:class:`Description`). Times are UTC.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from dstrial.file_writes import replace_file

NUM_DAILY = 7
"""How many daily copies are kept."""

DAY_S = 24 * 3600.0

_FORMAT = 1
_NAME = re.compile(r"(daily|master)-(\d{8}-\d{6})\.db")
_TIME = "%Y%m%d-%H%M%S"


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What was copied, and how to tell that it is whole.

    Attributes:
        sha256: of the copy's file.
        cluster_id: whose it is.
        highest: table -> highest id that it had given.
        time_s: when it was made, seconds since the epoch.
    """

    sha256: str
    cluster_id: str
    highest: Mapping[str, int]
    time_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One copy beside a database.

    Attributes:
        path: the file.
        is_daily: whether the master made it by itself.
        time_s: when it was made, seconds since the epoch, by its name.
    """

    path: Path
    is_daily: bool
    time_s: float


def directory_of(database: Path) -> Path:
    """Return where a database's copies lie."""
    return database.parent / "backups"


def new_path(database: Path, now_s: float, kind: str) -> Path:
    """Return what a copy made now is called.

    Args:
        database: what is copied.
        now_s: seconds since the epoch.
        kind: ``daily`` or ``master``.
    """
    moment = datetime.datetime.fromtimestamp(now_s, datetime.timezone.utc)
    return directory_of(database) / f"{kind}-{moment.strftime(_TIME)}.db"


def list_copies(database: Path) -> list[Copy]:
    """Return the copies beside a database, newest first."""
    try:
        paths = list(directory_of(database).iterdir())
    except OSError:
        return []
    found = []
    for path in paths:
        match = _NAME.fullmatch(path.name)
        if match is not None:
            moment = datetime.datetime.strptime(match[2], _TIME).replace(tzinfo=datetime.timezone.utc)
            found.append(Copy(path, match[1] == "daily", moment.timestamp()))
    return sorted(found, key=lambda copy: (copy.time_s, copy.path.name), reverse=True)


def newest_copy(database: Path) -> Path | None:
    """Return the newest copy beside a database; None if there is none."""
    found = list_copies(database)
    return found[0].path if found else None


def is_due(found: Sequence[Copy], now_s: float) -> bool:
    """Whether a daily copy is to be made; also where the clock has been set back."""
    return all(abs(now_s - copy.time_s) >= DAY_S for copy in found if copy.is_daily)


def superfluous(found: Sequence[Copy], num_kept: int = NUM_DAILY) -> list[Path]:
    """Return the daily copies beyond those kept; ``found`` is newest first."""
    return [copy.path for copy in found if copy.is_daily][num_kept:]


def remove(copy: Path) -> None:
    """Delete a copy and its description."""
    copy.unlink(missing_ok=True)
    description_path(copy).unlink(missing_ok=True)


def description_path(copy: Path) -> Path:
    """Return where a copy's description lies."""
    return copy.with_name(f"{copy.name}.json")


def write_description(copy: Path, description: Description) -> None:
    """Store a copy's description beside it."""
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(description)}, indent=1)
    replace_file(description_path(copy), f"{text}\n", is_private=True)


def read_description(copy: Path) -> Description | None:
    """Return a copy's description; None if there is none.

    Raises:
        ValueError: it is damaged.
    """
    try:
        fields = json.loads(description_path(copy).read_text(encoding="utf-8"))
        if fields.pop("format") != _FORMAT:
            raise ValueError("it is of another format")
        return Description(**fields)
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(str(error)) from error


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()
