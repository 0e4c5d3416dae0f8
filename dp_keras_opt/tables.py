"""Tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of strings under their titles, as lines with aligned columns."""
    rows = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
