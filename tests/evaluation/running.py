"""Questions and command lines for tests of `evaluation.run`, and what two runs must agree in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from evaluation.answers import Answer, read_answers
from evaluation.run import app

TIMED = {"tstamp", "wall_time", "prefill_seconds", "decode_seconds"}


def write_questions(path: Path, *turns: list[str], first_id: int = 81) -> Path:
    rows = [{"question_id": first_id + i, "category": "writing", "turns": t} for i, t in enumerate(turns)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def arguments(pair: tuple[str, str], questions: Path, answers: Path, *more: str) -> list[str]:
    """A small run on the CPU with a tree that the tiny head can fill."""
    return [
        *("--base-model-path", pair[0], "--ea-model-path", pair[1], "--device", "cpu", "--warm-up", "0"),
        *("--question-file", str(questions), "--answer-file", str(answers)),
        *(() if "ar" in more else ("--total-token", "12", "--depth", "3", "--top-k", "4")),
        *(() if "--max-new-token" in more else ("--max-new-token", "12")),
        *more,
    ]


def invoke(args: list[str]) -> Result:
    return CliRunner().invoke(app, args)


def run(args: list[str], answers: Path) -> list[Answer]:
    """The rows of a run that must succeed."""
    result = invoke(args)
    assert result.exit_code == 0, result.output
    return read_answers(answers)


def untimed(value: Any) -> Any:
    """Rows without what a clock put into them."""
    if isinstance(value, Answer):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return {name: untimed(inner) for name, inner in value.items() if name not in TIMED}
    return [untimed(inner) for inner in value] if isinstance(value, list) else value
