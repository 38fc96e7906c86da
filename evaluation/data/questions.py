"""Questions in EAGLE's format: a JSON object a line with `question_id`, `category`, `turns`, perhaps `reference`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle_mars.errors import ConfigError


class Question(BaseModel):
    """One question.

    turns: the user's messages, complete: instructions belong to them.
    reference: what a grader compares with; what it holds is the task's business (`evaluation.tasks`).
    prompt, entry_point, canonical_solution, test: a function to complete, under HumanEval's names.
    test_list, test_setup_code: tests of a function to write, under MBPP's names.
    expression: computes a numeric reference (the project's own problems).
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    question_id: int | str
    category: str = ""
    turns: tuple[str, ...] = Field(min_length=1)
    reference: tuple[str, ...] = ()
    task_id: str | None = None
    prompt: str | None = None
    entry_point: str | None = None
    canonical_solution: str | None = None
    test: str | None = None
    test_list: tuple[str, ...] = ()
    test_setup_code: str = ""
    expression: str | None = None

    @field_validator("reference", mode="before")
    @classmethod
    def _none_is_no_reference(cls, value: object) -> object:
        return () if value is None else value

    @model_validator(mode="after")
    def _turns_say_something(self) -> Self:
        if not all(turn.strip() for turn in self.turns):
            raise ValueError("a turn is empty")
        return self


def read_questions(path: Path) -> list[Question]:
    """All questions of a file, in its order.

    Raises ConfigError if the file can't be read or holds none, a line is no question, or an id occurs twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no question file {path}; correct the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the questions in {path}: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    questions = [_parse(path, number, line) for number, line in lines]
    if not questions:
        raise ConfigError(f"{path} holds no question; write one a line.")
    require_distinct_ids(questions, str(path))
    return questions


def require_distinct_ids(questions: Sequence[Question], source: str) -> None:
    """An answer names its question by id alone, so two questions can't share one."""
    seen: set[int | str] = set()
    for question in questions:
        if question.question_id in seen:
            raise ConfigError(f"{source} holds question_id {question.question_id} twice; give each question its own.")
        seen.add(question.question_id)


def fingerprint(questions: Sequence[Question]) -> str:
    """sha256 of the questions' content in their order, whatever they were read from."""
    digest = hashlib.sha256()
    for question in questions:
        digest.update(question.model_dump_json(exclude_defaults=True).encode() + b"\n")
    return digest.hexdigest()


def _parse(path: Path, number: int, line: str) -> Question:
    try:
        return Question.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        example = '{"question_id": 1, "category": "math", "turns": ["..."]}'
        raise ConfigError(
            f"{path}:{number} is no question ({where}: {first['msg']}); a line looks like {example}."
        ) from error
