"""Keep one rank per slot of a worker: start it, pass orders and answers, end it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrial.dsat.worker.rpc import Connection, ready
from dstrial.fork_server import client
from dstrial.fork_server.fork import Program
from dstrial.ranks.job_secret import STORE_VARIABLE, store_variable_of_generation

logger = logging.getLogger(__name__)

_RANK_MODULE = "dstrial.dsat.rank.rank_server"


class _Rank:
    """A rank's process, and the pipe on which it sends results."""

    def __init__(self, generation: int, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self.generation = generation
        self._unread = b""
        self._answers, writer = os.pipe()
        orders, self._orders = os.pipe()
        command = [sys.executable, "-m", _RANK_MODULE, "--answers", str(writer), *words]
        program = Program(command[1:], variables, str(Path.cwd()), numbers=(0, 1, 2, writer))
        try:
            self.process = client.fork_or_none(program, [orders, 1, 2, writer]) or subprocess.Popen(
                command, stdin=orders, env=dict(variables), pass_fds=(writer,)
            )
        finally:
            os.close(orders)
            os.close(writer)

    def fileno(self) -> int:
        return self._answers

    def order(self, message: Mapping[str, Any]) -> None:
        """Send a task; a dead rank is noticed by its closed pipe."""
        with contextlib.suppress(OSError), os.fdopen(self._orders, "wb", closefd=False) as file:
            file.write(json.dumps(message).encode() + b"\n")

    def answers(self) -> list[dict[str, Any]] | None:
        """Return its results so far; None if it has ended."""
        chunk = os.read(self._answers, 1 << 16)
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> int:
        """Kill it, if it lives, and return its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        status = self.process.wait()
        os.close(self._orders)
        os.close(self._answers)
        return status


def supervise(line: Connection, words: Sequence[str]) -> None:
    """Follow the chief's messages until ``end`` or its exit; the rank then ends too."""
    rank: _Rank | None = None
    try:
        while True:
            for spoke in ready([line] if rank is None else [line, rank], 3600.0):
                if spoke is rank and rank is not None:
                    answers = rank.answers()
                    for answer in answers or []:
                        line.send({"said": "answer", "generation": rank.generation, **answer})
                    if answers is None:
                        generation, status = rank.generation, _status_of(rank)
                        rank = None
                        line.send({"said": "died", "generation": generation, "status": status})
                elif spoke is line:
                    messages = line.receive()
                    if messages is None:
                        return
                    for message in messages:
                        if message["do"] == "end":
                            return
                        if message["do"] == "kill":
                            generation = message["generation"]
                            if rank is not None:
                                rank.end()
                                rank = None
                            line.send({"said": "killed", "generation": generation})
                        elif message["do"] == "measure":
                            if rank is not None and rank.generation != message["generation"]:
                                rank.end()
                                rank = None
                            if rank is None:
                                rank = _Rank(message["generation"], words, _variables(message))
                            rank.order(message["order"])
    finally:
        if rank is not None:
            rank.end()
        line.close()


def _status_of(rank: _Rank) -> int:
    """Return the status of a rank that closed its pipe, once it has died."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(5.0)
    return rank.end()


def _variables(message: Mapping[str, Any]) -> dict[str, str]:
    """Return a rank's environment with a rendezvous of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    meeting = kept.get(STORE_VARIABLE)
    if meeting:
        kept[STORE_VARIABLE] = store_variable_of_generation(
            meeting, port=message["port"], generation=message["generation"]
        )
    return {**kept, "MASTER_ADDR": message["addr"], "MASTER_PORT": str(message["port"])}


def signal_name(status: int) -> str:
    """Return ``SIGKILL`` for -9, ``exit code 1`` for 1."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
