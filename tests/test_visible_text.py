"""Escaping of control characters in text for terminals, logs and JSON."""

from __future__ import annotations

import logging
import sys

import pytest

from dstrial.master.http.responses import to_json
from dstrial.master.server import LogFormatter
from dstrial.visible_text import visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\x7f\x08b", "a\\x7f\\x08b"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("a\u2066b\u2069", "a\\u2066b\\u2069"),
        ("50%\r100%", "50%\\r100%"),
        ("line\r\nnext\n\ttab", "line\r\nnext\n\ttab"),
        ("ünï 日本 👩\u200d👧 שלום", "ünï 日本 👩\u200d👧 שלום"),
        ("", ""),
    ],
)
def test_visible_escapes_control_characters_only(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_visible_line_escapes_line_ends() -> None:
    assert visible_line("a\nb\tc\r\n\x1b") == "a\\nb\\tc\\r\\n\\x1b"


def test_to_json_escapes_text_but_not_data() -> None:
    import orjson

    data = orjson.Fragment(orjson.dumps({"x": "\x1b[2J"}))
    answer = {"name": "a\x1bb", "labels": ["\u202ec"], "notes": "two\nlines", 1: None, "config": data}

    assert orjson.loads(to_json(answer)) == {
        "name": "a\\x1bb",
        "labels": ["\\u202ec"],
        "notes": "two\nlines",
        "1": None,
        "config": {"x": "\x1b[2J"},
    }


def test_log_message_cannot_forge_lines() -> None:
    forged = "x\n2026-01-01T00:00:00.000 ERROR dstrial: forged\x1b[2J"
    try:
        raise ValueError(forged)
    except ValueError:
        record = logging.LogRecord("dstrial", logging.INFO, "", 1, "%s", (forged,), sys.exc_info())

    lines = LogFormatter().format(record).split("\n")

    assert lines[0].endswith("dstrial: x\\n2026-01-01T00:00:00.000 ERROR dstrial: forged\\x1b[2J")
    assert [line for line in lines[1:] if not line.startswith("    ")] == []
    assert "\x1b" not in "".join(lines)
