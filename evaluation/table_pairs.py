"""What relaxation changed in the runs behind a table: every arm of a row's task paired with its `exact` arm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evaluation.arms import Arm
from evaluation.divergence import markdown, report
from evaluation.graders.grade import Graded
from evaluation.tables import Part, Row, Table


def paired_reports(table: Table, decoded: Mapping[Row, Arm], graded: Mapping[Row, Graded]) -> str:
    """Markdown, a section per task and temperature of every part that names a margin; empty if there is none."""
    sections = []
    for part in table.parts:
        base_arm = next((name for name, arm in part.arms.items() if arm.method == "exact"), None)
        for base in part.rows() if part.margin else ():
            if base.arm == base_arm and base in decoded:
                rivals = [row for row in decoded if row.arm in part.arms and row != base and _beside(row, base)]
                sections += [f"## {_title(base)}\n", _section(part, base, rivals, decoded, graded)]
    return "\n".join([f"# {table.title}: paired with exact\n", *sections]) if sections else ""


def _section(part: Part, base: Row, rivals: list[Row], decoded: Mapping[Row, Arm], graded: Mapping[Row, Graded]) -> str:
    assert part.margin is not None
    reports = [
        replace(report(decoded[row], decoded[base], graded[row], graded[base], part.margin), arm=row.arm)
        for row in rivals
    ]
    questions = len(decoded[base].answers)
    head = {"task": base.task, "questions": questions, "base": base.arm, "margin": part.margin, "seed": 0}
    return markdown(head, reports)


def _beside(row: Row, base: Row) -> bool:
    """Whether the two differ in the arm only."""
    return row.model_copy(update={"arm": base.arm}) == base


def _title(row: Row) -> str:
    tree = f", {row.tree}" if row.tree else ""
    return f"{row.model}, {row.task}, T = {row.temperature:g}{tree}"
