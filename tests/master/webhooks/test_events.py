"""Matching of log records against the patterns of webhooks."""

from __future__ import annotations

from typing import Any

import pytest

from dstrial.config.schema import compile_pattern
from dstrial.master.webhooks.events import LogTriggers, first_matches

TRACE = "Traceback (most recent call last):\n  f()\nValueError: x"


def test_pattern_spans_lines_but_not_records() -> None:
    patterns = [(1, compile_pattern("(?s)Traceback.*ValueError")), (2, compile_pattern("(?s)one.*other"))]
    assert first_matches(patterns, ["one", TRACE, "other"]) == [(1, TRACE)]


def test_match_keeps_record_with_unicode_line_separator() -> None:
    assert first_matches([(1, compile_pattern("a.b"))], ["x", "1 a\u2028b 2"]) == [(1, "1 a\u2028b 2")]


def test_match_strips_line_ending_of_record(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    triggers = LogTriggers(nothing, nothing)
    monkeypatch.setattr(triggers, "_current", lambda: ((1, compile_pattern("^x$")),))
    assert triggers.find(["ax\r\n", "x\r\n"]) == [(1, "x")]
