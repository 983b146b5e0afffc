"""Pages on the way to a task's service: log in, wait, the task has ended."""

from __future__ import annotations

from typing import Literal

from starlette.responses import Response

from dstrial.master.store import commands
from dstrial.master.store.database import Connection
from dstrial.master.web.page import render

_REFRESH_S = 1


def state_of(connection: Connection, task_id: str) -> Literal["waiting", "ready", "ended"]:
    """Say how far a command has come with its service.

    Raises:
        NotFoundError: there is none.
    """
    row = commands.require(connection, task_id)
    if row.state in commands.ENDED:
        return "ended"
    return "ready" if row.is_ready else "waiting"


def waiting(task_id: str) -> Response:
    """Return a page that asks again every second."""
    return render("task.html", task_id=task_id, refresh_s=_REFRESH_S, text="is starting, or waits for slots")


def ended(task_id: str) -> Response:
    """Return a page that says so."""
    return render("task.html", 404, task_id=task_id, refresh_s=0, text="has ended; start another one")
