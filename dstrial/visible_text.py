"""Text for users: untrusted text without control characters, sizes, plurals."""

from __future__ import annotations

import re

# Escaped: C0 except tab and line feed, DEL, C1; line and paragraph separators; bidirectional control characters
# ("Trojan Source", CVE-2021-42574); a carriage return that is not before a line feed.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
_TABS_AND_BREAKS = re.compile("[\t\r\n]")
_SHORT = {"\r": "\\r", "\n": "\\n", "\t": "\\t"}


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def visible(text: str) -> str:
    r"""Escape control characters except tabs and newlines, as ``\x1b`` or ``\u202e``.

    Colour sequences are escaped too.
    """
    return text if text.isascii() and text.isprintable() else _CONTROLS.sub(_escaped, text)


def visible_line(text: str) -> str:
    r"""Escape control characters, tabs and newlines, so that the text is one line."""
    shown = visible(text)
    return shown if shown.isprintable() else _TABS_AND_BREAKS.sub(_escaped, shown)


def cut_text(text: str, limit: int) -> str:
    """Return ``text``; if longer than ``limit`` characters, without its middle.

    The omitted part is replaced by a note with its size. ``limit`` must be above 100.
    """
    if len(text) <= limit:
        return text
    half = limit // 2 - 25
    num_bytes = len(text[half:-half].encode(errors="replace"))
    return f"{text[:half]} [… {num_bytes:,} bytes are cut …] {text[-half:]}"


def size_text(num_bytes: float) -> str:
    """Format a size with three significant digits, for example ``1.25 GiB``."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 999.5 else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def plural(count: int, noun: str) -> str:
    """Return a number with its noun, for example ``1 slot`` or ``2 slots``.

    ``noun`` is a singular whose plural ends in ``s``.
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
