"""Run one measurement at a time on a worker's ranks, which are renewed if needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from dstrial.dsat.core.outcome import Failure, FailureKind, Outcome, outcome_from_json
from dstrial.dsat.worker.messages import TaskResult
from dstrial.dsat.worker.rpc import Connection, ready
from dstrial.dsat.worker.supervisor import signal_name
from dstrial.errors import RankError
from dstrial.ranks.sockets import free_port

# Grace period in which ranks that lost a peer may report it, before they are killed.
_GRACE_S = 5.0
_KILL_S = 60.0
_ASK_PERIOD_S = 1.0
_ENDS_RANKS = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM, FailureKind.COMMUNICATION, FailureKind.TIMEOUT)


class RankPool:
    """The ranks of a worker, which reach rank 0 at the address ``host``."""

    def __init__(self, lines: Mapping[int, Connection], host: str) -> None:
        self._connections = dict(lines)
        self._host = host
        self._port = 0
        self.generation = 0
        self._is_fresh_needed = True

    def measure(
        self,
        number: int,
        hparams: Mapping[str, Any],
        deadline_s: float,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> TaskResult | None:
        """Have all ranks measure a configuration; None if it was given up.

        Raises:
            RankError: a supervisor has gone, and with it a slot.
        """
        began_s = time.monotonic()
        if self._is_fresh_needed:
            self.generation += 1
            self._port = free_port(self._host)
            self._is_fresh_needed = False
        message = {
            "do": "measure",
            "generation": self.generation,
            "addr": self._host,
            "port": self._port,
            "order": {"number": number, "hparams": dict(hparams)},
        }
        for line in self._connections.values():
            line.send(message)
        said, is_overdue = self._receive_all(number, began_s + deadline_s, is_given_up)
        if said is None:
            self._end_ranks()
            return None
        outcome = _outcome(said)
        if is_overdue and not any("outcome" in one or "status" in one for one in said.values()):
            took_s = time.monotonic() - began_s
            message_ = f"it was ended after {took_s:.0f} s; expected at most {deadline_s:.0f} s"
            outcome = Failure(FailureKind.TIMEOUT, message_)
        reason = self._why_to_respawn(said, outcome)
        if reason:
            self._end_ranks()
        details = said.get(0, {}).get("details", {})
        return TaskResult(number, outcome, time.monotonic() - began_s, self.generation, reason, details)

    def end(self) -> None:
        for line in self._connections.values():
            line.send({"do": "end"})
            line.close()

    # ---- machinery -------------------------------------------------------------------------------

    def _receive_all(
        self, number: int, deadline_at_s: float, is_given_up: Callable[[], bool]
    ) -> tuple[dict[int, dict[str, Any]] | None, bool]:
        """Return each rank's message, None if given up, and whether it was too late."""
        said: dict[int, dict[str, Any]] = {}
        until_s = deadline_at_s
        ask_at_s = time.monotonic() + _ASK_PERIOD_S
        while len(said) < len(self._connections):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return said, until_s == deadline_at_s
            if time.monotonic() >= ask_at_s:
                if is_given_up():
                    return None, False
                ask_at_s = time.monotonic() + _ASK_PERIOD_S
            for rank, message in self._receive(min(left_s, 1.0)):
                if message["generation"] != self.generation or message["said"] == "killed":
                    continue
                if message["said"] == "answer" and message["number"] != number:
                    continue
                said[rank] = message
                if message["said"] == "died" or "failure" in message["outcome"]:
                    until_s = min(until_s, time.monotonic() + _GRACE_S)
        return said, False

    def _receive(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        received = []
        for line in ready(list(self._connections.values()), timeout_s):
            rank = next(rank for rank, one in self._connections.items() if one is line)
            messages = line.receive()
            if messages is None:
                raise RankError(
                    f"the supervisor of rank {rank} has gone; expected it to live as long as its worker. Look at its output."
                )
            received += [(rank, message) for message in messages]
        return received

    def _why_to_respawn(self, said: Mapping[int, dict[str, Any]], outcome: Outcome) -> str:
        if isinstance(outcome, Failure) and outcome.kind in _ENDS_RANKS:
            return outcome.kind.value
        silent = [rank for rank in self._connections if "outcome" not in said.get(rank, {})]
        if silent:
            return f"rank(s) {', '.join(map(str, silent))} did not answer"
        for rank, message in sorted(said.items()):
            if message["grown"]:
                return f"rank {rank} does not come back to what it was: {', '.join(message['grown'])}"
        return ""

    def _end_ranks(self) -> None:
        self._is_fresh_needed = True
        for line in self._connections.values():
            line.send({"do": "kill", "generation": self.generation})
        waiting = set(self._connections)
        give_up_at_s = time.monotonic() + _KILL_S
        while waiting:
            if time.monotonic() > give_up_at_s:
                raise RankError(
                    f"rank(s) {sorted(waiting)} are still there {_KILL_S:.0f} s after SIGKILL; expected them to end. "
                    "Look for a driver or file system that hangs."
                )
            for rank, message in self._receive(1.0):
                if message["said"] == "killed" and message["generation"] == self.generation:
                    waiting.discard(rank)


def _outcome(said: Mapping[int, dict[str, Any]]) -> Outcome:
    """Return rank 0's measurement, or the failure that caused the others."""
    failures: list[Failure] = []
    for rank, message in sorted(said.items()):
        if message["said"] == "died":
            # Before the failures that only report the loss of this rank.
            failures.insert(0, _failure_from_exit(rank, int(message["status"])))
            continue
        outcome = outcome_from_json(message["outcome"])
        if isinstance(outcome, Failure):
            failures.append(outcome)
    if failures:
        return min(failures, key=lambda failure: failure.kind is FailureKind.COMMUNICATION)
    if 0 in said:
        return outcome_from_json(said[0]["outcome"])
    return Failure(FailureKind.TIMEOUT, "no rank answered")


def _failure_from_exit(rank: int, status: int) -> Failure:
    name = signal_name(status)
    if name == "SIGKILL":
        message = f"rank {rank} was killed by SIGKILL, as the kernel does when memory runs out"
        return Failure(FailureKind.HOST_OOM, message, rank=rank)
    return Failure(FailureKind.COMMUNICATION, f"rank {rank} ended with {name} and without a word", rank=rank)
