"""Ends a run of tests after the minutes that it was given, and names the tests that it left out."""

from __future__ import annotations

import time

import pytest

VARIABLE = "TEST_MINUTES"
"""A variable: no test begins after so many minutes. Without it all run."""
_REASON = f"not run: the minutes of {VARIABLE} are over"


class TimeGiven:
    """A plugin of pytest, for its workers and for who collects their reports.

    Args:
        minutes: from now.
    """

    def __init__(self, minutes: float) -> None:
        self._minutes = minutes
        self._over_at_s = time.monotonic() + 60 * minutes
        self._left_out: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Begin no test when the time is over."""
        if time.monotonic() >= self._over_at_s:
            pytest.skip(_REASON)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what did not begin."""
        if report.skipped and _REASON in str(report.longrepr):
            self._left_out.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name them."""
        if self._left_out:
            terminalreporter.section(f"{len(self._left_out)} not run within {self._minutes:g} minutes")
            terminalreporter.write_line("\n".join(self._left_out))
