"""Patterns of log policies: RE2, as in Determined, whose search takes time linear in the text whatever the pattern is."""

from __future__ import annotations

from typing import Any

import re2

_MAX_MEMORY_BYTES = 2**23
"""What one compiled pattern may take; RE2's own default."""


def compile_pattern(text: str) -> Any:
    """Compile a pattern whose ``^`` and ``$`` match at the lines of a text.

    Python's own search backtracks: ``(a+)+$`` and a line of forty letters would hold the master up for hours.

    Args:
        text: the pattern, in the syntax of https://github.com/google/re2/wiki/Syntax.

    Returns:
        An object with ``search(str)``.

    Raises:
        ValueError: it is no pattern of RE2's; says why.
    """
    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_MEMORY_BYTES
    try:
        return re2.compile(f"(?m){text}", options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        raise ValueError(
            reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        ) from None
    except UnicodeEncodeError:
        raise ValueError("half a surrogate") from None
