"""Consecutive failures: each delays the next attempt for longer, and after some the caller gives up."""

from __future__ import annotations

from dstrial.master.scheduler.retries import Retries


def test_retries_back_off_and_end() -> None:
    now_s = 0.0
    retries = Retries(first_s=1, longest_s=5, limit=4, clock=lambda: now_s)
    assert retries.is_due("a")

    delays = []
    for attempt in range(4):
        assert retries.record_failure("a") is (attempt == 3)
        assert not retries.is_due("a")
        delays.append(retries.delay_s("a"))
        now_s += delays[-1]
        assert retries.is_due("a")

    assert delays == [1, 2, 4, 5]
    assert retries.is_due("b")


def test_retries_begin_anew_after_success() -> None:
    retries = Retries(limit=2)
    assert not retries.record_failure("a")
    retries.forget("a")
    assert retries.is_due("a")
    assert not retries.record_failure("a")


def test_failure_of_the_machine_never_counts() -> None:
    retries = Retries(limit=2)
    assert not any(retries.record_failure("a", counts=False) for _ in range(9))
