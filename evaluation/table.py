"""Cells → Markdown: one row per arm, reasons of empty cells numbered below the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from evaluation.metrics import Cell

Rows = Mapping[str, Mapping[str, Cell]]
_NOT_MEASURED = Cell.empty("not measured for this arm")


def markdown_table(rows: Rows, first: str = "arm") -> str:
    """A table of name → column → cell; its columns are those of all rows. first: heading of the names."""
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    reasons: dict[str, int] = {}
    lines = [f"| {first} | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for name, cells in rows.items():
        shown = [_show(cells.get(column, _NOT_MEASURED), reasons) for column in columns]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += ["", *(f"({number}) {reason}.  " for reason, number in reasons.items())] if reasons else []
    return "\n".join(lines) + "\n"


def plain(cells: Mapping[str, Cell]) -> dict[str, dict[str, Any]]:
    """For JSON; what a cell doesn't have is left out."""
    return {
        name: {key: value for key, value in asdict(cell).items() if value is not None and value != ""}
        for name, cell in cells.items()
    }


def _show(cell: Cell, reasons: dict[str, int]) -> str:
    if cell.value is None:
        return f"({reasons.setdefault(cell.reason, len(reasons) + 1)})"
    if cell.low is None or cell.high is None:
        return f"{cell.value:.4g}"
    return f"{cell.value:.4g} [{cell.low:.4g}, {cell.high:.4g}]"
