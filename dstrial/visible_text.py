"""Write text of others so that a terminal shows it instead of obeying it."""

from __future__ import annotations

import re

# C0 but tab and line feed, DEL, C1; line and paragraph separators; marks that turn the direction of what follows
# ("Trojan Source", CVE-2021-42574). A carriage return before a line feed is a line's end and nothing else.
_OBEYED = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
_OF_LINE = re.compile("[\t\r\n]")
_SHORT = {"\r": "\\r", "\n": "\\n", "\t": "\\t"}


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def visible(text: str) -> str:
    r"""Write control characters but tabs and line ends as ``\x1b`` or ``\u202e``.

    That includes colours: an escape sequence that only colours cannot be told from others by a glance, and a log that is
    read later, by somebody else, in another terminal, is no place for any of them.
    """
    return text if text.isascii() and text.isprintable() else _OBEYED.sub(_escaped, text)


def visible_line(text: str) -> str:
    r"""Return a text like ``visible``, on one line: ``\t`` and ``\n`` are written, too."""
    shown = visible(text)
    return shown if shown.isprintable() else _OF_LINE.sub(_escaped, shown)


def cut_text(text: str, limit: int) -> str:
    """Cut the middle of a text of more than ``limit`` characters, which is over 100."""
    if len(text) <= limit:
        return text
    half = limit // 2 - 25
    num_bytes = len(text[half:-half].encode(errors="replace"))
    return f"{text[:half]} [… {num_bytes:,} bytes are cut …] {text[-half:]}"
