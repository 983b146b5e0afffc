"""Shared code of the doctor's checks: findings, timeouts for calls that may hang."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

# ok: works. note: works, with a remark. problem: some trainings fail.
Status = Literal["ok", "note", "problem"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One output line of ``dstrial doctor``."""

    name: str  # of what was checked: a few words, stable between versions
    status: Status
    what: str  # result of the check, without a full stop
    todo: str = ""  # advice for the user, as sentences; empty if there is nothing to do


def ok(name: str, what: str) -> Finding:
    return Finding(name, "ok", printable(what))


def note(name: str, what: str, todo: str) -> Finding:
    return Finding(name, "note", printable(what), todo)


def problem(name: str, what: str, todo: str) -> Finding:
    return Finding(name, "problem", printable(what), todo)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The findings of one check."""

    name: str
    seconds: float
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seconds": round(self.seconds, 3)}


def count(groups: Iterable[Group]) -> dict[Status, int]:
    counts: dict[Status, int] = {"ok": 0, "note": 0, "problem": 0}
    for group in groups:
        for finding in group.findings:
            counts[finding.status] += 1
    return counts


def printable(text: str) -> str:
    """Return ``text`` with its unprintable characters, such as newlines, escaped."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


class NoAnswerError(Exception):
    """A call did not return before its deadline."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")


class Background(Generic[T]):
    """Runs a call in a daemon thread, so that a hanging call does not block the exit."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._began_at_s = time.monotonic()
        self._ended_at_s: float | None = None
        threading.Thread(target=self._run, args=(call,), name="doctor", daemon=True).start()

    def result(self, timeout_s: float) -> T:
        """Return the call's result or raise its exception.

        Raises:
            NoAnswerError: the call has not ended ``timeout_s`` after its start.
        """
        left_s = max(0.0, self._began_at_s + timeout_s - time.monotonic())
        if not concurrent.futures.wait([self._future], left_s).done:
            raise NoAnswerError(timeout_s)
        return self._future.result()

    @property
    def seconds(self) -> float:
        return (self._ended_at_s or time.monotonic()) - self._began_at_s

    def _run(self, call: Callable[[], T]) -> None:
        try:
            value = call()
            self._ended_at_s = time.monotonic()
            self._future.set_result(value)
        except BaseException as error:  # noqa: BLE001 - raised by ``result``
            self._ended_at_s = time.monotonic()
            self._future.set_exception(error)


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return the result of ``call``, or raise ``NoAnswerError`` after ``timeout_s``."""
    return Background(call).result(timeout_s)
