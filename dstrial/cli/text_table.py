"""Tables as plain text, the same on a terminal, in a pipe and in a log: columns padded with spaces."""

from __future__ import annotations

from collections.abc import Sequence

from dstrial.visible_text import visible_line


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Lay out rows under a header.

    Args:
        header: name of each column.
        rows: cells; None becomes ``-``.
        right: columns, 0-based, that are aligned to the right, for numbers.

    Returns:
        One line per row, each with its end, without spaces at the end.
    """
    cells = [
        list(header),
        *([("-" if cell is None else visible_line(str(cell))) for cell in row] for row in rows),
    ]
    widths = [max(len(row[idx]) for row in cells) for idx in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if idx in right else cell.ljust(width)
            for idx, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "".join(f"{line}\n" for line in lines)


def field_lines(fields: Sequence[tuple[str, object]]) -> str:
    """Lay out names and values, one per line, values below each other; fields whose value is None are left out."""
    shown = [(name, value) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in shown), default=0) + 3
    return "".join(f"{name + ':':<{width}}{visible_line(str(value))}\n" for name, value in shown)
