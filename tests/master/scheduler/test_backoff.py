"""Backoff after consecutive failures."""

from __future__ import annotations

from dstrial.master.scheduler.backoff import Backoff


def test_delays_double_until_success() -> None:
    now_s = 0.0
    backoff = Backoff(first_s=1, longest_s=5, clock=lambda: now_s)
    delays = []
    for _ in range(4):
        backoff.record_failure("a")
        delays.append(backoff.delay_s("a"))
        now_s += delays[-1]
        assert backoff.delay_s("a") == 0

    assert delays == [1, 2, 4, 5]
    assert (backoff.has_failed("a"), backoff.has_failed("b")) == (True, False)
    backoff.forget("a")
    backoff.record_failure("a")
    assert backoff.postponed() == {"a": 1.0}
