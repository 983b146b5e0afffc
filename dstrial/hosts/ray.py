"""Starts programs on the nodes of a Ray job, by the job's actors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from dstrial.hosts.transport import Refusal, last_line, remote_words
from dstrial.ray import relay

_CONNECT_S = 40.0


class RayTransport:
    """Starts programs in a placement group; the bridge's ``socket`` may appear later."""

    connect_s = _CONNECT_S

    def __init__(self, job_id: str, socket: Path) -> None:
        self._job_id = job_id
        self._socket = socket

    def words(self, host: str, python: str) -> list[str]:
        place = [str(self._socket), self._job_id, host]
        return [sys.executable, "-I", "-S", str(Path(relay.__file__)), *place, *remote_words(python)]

    def environment(self) -> Mapping[str, str] | None:
        return None

    def refusal(self, host: str, python: str, exit_code: int | None, errors: str) -> Refusal:
        text = errors.lower()
        if exit_code is None:
            return Refusal(
                f"silent (Ray has started no actor there within {_CONNECT_S:g} s)",
                f"Look at `ray status`, and on {host} at /tmp/ray/session_latest/logs/raylet.out.",
            )
        if "exec format error" in text:
            return Refusal(
                f"another kind of machine than {python} is for", "Use a cluster whose nodes are of one kind."
            )
        if "no such file or directory" in text or exit_code == 127:
            return Refusal(
                f"without Python at {python}",
                "Put the environment on a file system that all nodes mount, or name another interpreter.",
            )
        if "is over" in text or "has no node" in text:
            return Refusal(
                f"not the job's any more ({last_line(errors)})",
                "Nothing is to be done: it is asked for again.",
            )
        return Refusal(
            f"not starting a program (exit code {exit_code}): {last_line(errors) or 'nothing was printed'}",
            "Look at `ray status`, and at `ray list actors --filter state=ALIVE`.",
        )
