"""Formats each message of the master's log as one line, whatever a user has put into it."""

from __future__ import annotations

import logging
from typing import Any

from dstrial.visible_text import visible, visible_line

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_INDENT = "    "


class LogFormatter(logging.Formatter):
    """Escapes line ends in messages and indents tracebacks, so that no user's text looks like a message."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = visible_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"{_INDENT}{visible(line)}" for line in text.split("\n"))
