"""Medians, percentiles and tables, with the standard library only."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` of the values do not exceed. `ordered` ascends and is not empty."""
    place = -(-len(ordered) * percent // 100) - 1
    return ordered[max(0, min(len(ordered) - 1, int(place)))]


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, words: int = 1) -> str:
    """A table in Markdown, columns aligned: the first `words` columns to the left, the others to the right."""
    cells = [[shown(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    rule = ["-" * width if place < words else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rule, *cells[1:]):
        aligned = [
            cell.ljust(width) if place < words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(aligned)} |")
    return "\n".join(lines)


def shown(value: object) -> str:
    """A number for people: 3 significant digits, with thousands separators; anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
