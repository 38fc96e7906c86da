"""A table with its cells filled: published, ours, and the difference; and how it reads as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

from pydantic import BaseModel, ConfigDict

from evaluation.metrics import Cell
from evaluation.tables import Row


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class FilledRow(_Record):
    """questions: how many were asked of our run. published, ours: by metric."""

    row: Row
    questions: int
    published: dict[str, Cell]
    ours: dict[str, Cell]

    @property
    def has_numbers(self) -> bool:
        return any(cell.value is not None for cell in (*self.published.values(), *self.ours.values()))

    def cells(self, metric: str) -> tuple[Cell, Cell, Cell]:
        """Published, ours, and ours minus published with the interval of ours: published values have none."""
        published, ours = self.published[metric], self.ours[metric]
        return published, ours, difference(published, ours)


class FilledPart(_Record):
    title: str
    metrics: tuple[str, ...]
    rows: tuple[FilledRow, ...]

    def is_published(self, metric: str) -> bool:
        """Whether any row has a published value of the metric; otherwise there is nothing to compare ours with."""
        return any(filled.published[metric].value is not None for filled in self.rows)

    @property
    def told_rows(self) -> list[FilledRow]:
        """Rows with a number."""
        return [filled for filled in self.rows if filled.has_numbers]


class FilledTable(_Record):
    """scope: what the reproduction was narrowed to. provenance: `evaluation.provenance` of the run that rendered it."""

    name: str
    title: str
    source: str
    notes: tuple[str, ...]
    scope: dict[str, Any]
    parts: tuple[FilledPart, ...]
    provenance: dict[str, Any]


def difference(published: Cell, ours: Cell) -> Cell:
    """Ours minus published."""
    if ours.value is None or published.value is None:
        return Cell.empty("needs both values")
    bounds = (None, None) if ours.low is None or ours.high is None else (ours.low, ours.high)
    low, high = (None if bound is None else bound - published.value for bound in bounds)
    return Cell(ours.value - published.value, low, high)


def mean_cell(cells: Sequence[Cell]) -> Cell:
    """The mean over tasks, whose errors are independent, so that half-widths add in squares; empty if one is."""
    reasons = list(dict.fromkeys(cell.reason for cell in cells if cell.value is None))
    if reasons:
        everywhere = len(reasons) == 1 and all(cell.value is None for cell in cells)
        return Cell.empty(reasons[0] if everywhere else f"a task has no value: {reasons[0]}")
    value = sum(cell.value or 0.0 for cell in cells) / len(cells)
    if any(cell.low is None or cell.high is None for cell in cells):
        return Cell(value)
    below = sqrt(sum(((c.value or 0) - (c.low or 0)) ** 2 for c in cells)) / len(cells)
    above = sqrt(sum(((c.high or 0) - (c.value or 0)) ** 2 for c in cells)) / len(cells)
    return Cell(value, value - below, value + above)


# --- how it reads ---


def labels(part: FilledPart) -> list[tuple[str, Callable[[Row], str]]]:
    """Columns that name a row; tree and temperature only where they tell rows apart."""
    found: list[tuple[str, Callable[[Row], str]]] = [("model", lambda row: row.model), ("task", lambda row: row.task)]
    if any(filled.row.tree for filled in part.rows):
        found.append(("tree", lambda row: row.tree))
    if len({filled.row.temperature for filled in part.rows}) > 1:
        found.append(("T", lambda row: f"{row.temperature:g}"))
    return [*found, ("method", lambda row: row.arm)]


def markdown(table: FilledTable) -> str:
    """The whole table with notes, reasons of empty cells and what is needed to repeat it."""
    reasons: dict[str, int] = {}
    lines = [f"# {table.title}", "", f"Published: {table.source}.", ""]
    for part in table.parts:
        lines += [f"## {part.title}", "", *markdown_rows(part, reasons), *_left_out(part, reasons), ""]
    lines += [f"({number}) {reason}.  " for reason, number in reasons.items()]
    lines += ["", *(f"- {note}" for note in table.notes), "", repeat(table)]
    return "\n".join(lines) + "\n"


def markdown_rows(part: FilledPart, reasons: dict[str, int]) -> list[str]:
    """The lines of one part's table. reasons: footnotes so far; new ones are added.

    A metric that is nowhere published has one column, ours; rows without any number are left out.
    """
    names = labels(part)
    head = [name for name, _ in names] + ["n"]
    for metric in part.metrics:
        head += [f"{metric}: published", "ours", "difference"] if part.is_published(metric) else [metric]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(names) + "---:|" * (len(head) - len(names))]
    for filled in part.told_rows:
        cells = [text(filled.row) for _, text in names] + [str(filled.questions)]
        for metric in part.metrics:
            published, ours, gap = filled.cells(metric)
            if part.is_published(metric):
                cells += [_show(published, reasons), _show(ours, reasons), _show(gap, reasons, signed=True)]
            else:
                cells.append(_show(ours, reasons))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _left_out(part: FilledPart, reasons: dict[str, int]) -> list[str]:
    """What the table doesn't show, and why."""
    lines = []
    alone = [metric for metric in part.metrics if not part.is_published(metric)]
    if alone:
        reason = part.rows[0].published[alone[0]].reason
        lines.append(f"No published value of {', '.join(alone)}: ({reasons.setdefault(reason, len(reasons) + 1)}).")
    empty: dict[tuple[str, str], list[str]] = {}
    for filled in part.rows:
        if not filled.has_numbers:
            cell = filled.ours[part.metrics[0]]
            tasks = empty.setdefault((filled.row.model, cell.reason), [])
            tasks += [filled.row.task] if filled.row.task not in tasks else []
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (model, reason), tasks in empty.items():
        alike.setdefault((tuple(tasks), reason), []).append(model)
    for (tasks_without, reason), models in alike.items():
        number = reasons.setdefault(reason, len(reasons) + 1)
        lines.append(f"Neither published nor run: {', '.join(tasks_without)} with {', '.join(models)} ({number}).")
    return ["", "  \n".join(lines)] if lines else []


def repeat(table: FilledTable) -> str:
    """The command, machine and versions, in one paragraph."""
    source = table.provenance
    packages = ", ".join(f"{name} {version}" for name, version in source["packages"].items())
    return (
        f"`{source['command']}`; {source['device']}, {source['threads']} threads, {packages}, commit "
        f"{source['commit'][:10]}{' with changes' if source['dirty'] else ''}, {source['date']}. "
        "Brackets: 95 % intervals, bootstrap by question; of a mean over tasks, from its tasks' intervals."
    )


def to_csv(table: FilledTable) -> str:
    """One line per cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    keys = ("model", "temperature", "tree", "task", "arm")
    numbers = ("published", "ours", "low", "high", "difference")
    writer.writerow(["part", *keys, "questions", "metric", *numbers, "why not published", "why not ours"])
    for part in table.parts:
        for filled in part.rows:
            named = [getattr(filled.row, key) for key in keys]
            for metric in part.metrics:
                published, ours, gap = filled.cells(metric)
                values = (published.value, ours.value, ours.low, ours.high, gap.value)
                cells = ["" if value is None else f"{value:.6g}" for value in values]
                writer.writerow([part.title, *named, filled.questions, metric, *cells, published.reason, ours.reason])
    return out.getvalue()


def latex(table: FilledTable) -> str:
    """A tabular (booktabs) per part, of the rows with a number. Empty cells are dashes; Markdown and CSV say why."""
    return "\n".join(_tabular(part) for part in table.parts)


def _tabular(part: FilledPart) -> str:
    names = labels(part)
    compared = {metric: part.is_published(metric) for metric in part.metrics}
    columns = "l" * len(names) + "".join("rrr" if three else "r" for three in compared.values())
    groups = " & ".join(rf"\multicolumn{{{3 if three else 1}}}{{c}}{{{_tex(m)}}}" for m, three in compared.items())
    under = [
        column for three in compared.values() for column in (["published", "ours", r"$\Delta$"] if three else ["ours"])
    ]
    head = " & ".join([_tex(name) for name, _ in names] + under)
    lines = [
        f"% {part.title}",
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        " & " * len(names) + groups + r" \\",
        head + r" \\",
        r"\midrule",
    ]
    for filled in part.told_rows:
        cells = [_tex(text(filled.row)) for _, text in names]
        for metric, three in compared.items():
            published, ours, gap = filled.cells(metric)
            shown = [_number(published), _number(ours), _number(gap, signed=True)] if three else [_number(ours)]
            cells += [_tex(number) for number in shown]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _show(cell: Cell, reasons: dict[str, int], signed: bool = False) -> str:
    if cell.value is None:
        if signed:
            return "-"  # the cells before it say why
        return f"({reasons.setdefault(cell.reason, len(reasons) + 1)})"
    if cell.low is None or cell.high is None:
        return _number(cell, signed)
    shape = "+.3g" if signed else ".4g"
    return f"{_number(cell, signed)} [{cell.low:{shape}}, {cell.high:{shape}}]"


def _number(cell: Cell, signed: bool = False) -> str:
    if cell.value is None:
        return "-"
    return f"{cell.value:+.3g}" if signed else f"{cell.value:.4g}"


_TEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "θ": r"$\theta$", "→": r"$\to$"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)
