"""One line for one message in the master's log, whatever a user has put into it."""

from __future__ import annotations

import logging
from typing import Any

from dstrial.visible_text import visible, visible_line

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_INDENT = "    "


class LogFormatter(logging.Formatter):
    """Writes time, level, logger and message; escapes line ends in a message.

    Lines of a traceback, which quote the user's own words, are indented, so that none can look like a message.
    """

    def __init__(self) -> None:
        super().__init__(_FORMAT, "%Y-%m-%dT%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line of a record."""
        record.message = visible_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Return a traceback."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        """Return a stack."""
        return _indented(super().formatStack(stack_info))


def _indented(text: str) -> str:
    return "\n".join(f"{_INDENT}{visible(line)}" for line in text.split("\n"))
