"""Commands that error messages of the store suggest for recovery."""

from __future__ import annotations

from pathlib import Path

END_AND_PUT_BACK = "End the master with `dstrial down`, and put a copy back with `dstrial restore`."
SEE_COPIES = "see `dstrial restore`"
SEE_LOG = "See what is wrong with `dstrial logs`"
START = "Start its master with `dstrial up`"


def put_back(copy: Path | None, directory: Path) -> str:
    return "`dstrial restore PATH`" if copy is None else f"`dstrial restore {copy} --state-dir {directory}`"
