"""``DSTRIAL_STORE``: the file in which the ranks of one machine meet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.ranks.identity import RankIdentity

STORE_VARIABLE = "DSTRIAL_STORE"
"""Environment variable with the file and, because other launchers that run below ours pass it on, the job it is for."""


def store_variable(path: Path, *, port: int, num_ranks: int) -> str:
    """Return the value of ``DSTRIAL_STORE``.

    It names the job as well, because the ranks of another launcher that runs below one of ours inherit it.

    Args:
        path: of a file that does not exist, in a directory that only this account can enter.
        port: ``MASTER_PORT`` of the ranks.
        num_ranks: ``WORLD_SIZE`` of the ranks.
    """
    return json.dumps({"path": str(path), "port": port, "num_ranks": num_ranks})


def store_variable_of_generation(value: str, *, port: int, generation: int) -> str:
    """Return ``DSTRIAL_STORE`` for restarted ranks, which have their own port."""
    place = json.loads(value)
    return json.dumps({**place, "path": f"{place['path']}.{generation}", "port": port})


def private_path(environ: Mapping[str, str], identity: RankIdentity) -> str | None:
    """Return the file in which this job's ranks meet, None if the launcher made none.

    Args:
        environ: of this rank.
        identity: who it is; a file for another port, number of ranks or several machines is not this job's.
    """
    value = environ.get(STORE_VARIABLE)
    if not value:
        return None
    place: dict[str, Any] = json.loads(value)
    is_this_job = (place["port"], place["num_ranks"]) == (identity.master_port, identity.world_size)
    return str(place["path"]) if is_this_job and identity.num_nodes == 1 else None
