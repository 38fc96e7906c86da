"""FastChat's files: answers, judgments of one answer, judgments of a pair. Key order is FastChat's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle_mars.errors import ConfigError
from evaluation.answers import QuestionId

PairWinner = Literal["model_1", "model_2", "tie", "error"]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class SingleJudgment(_Row):
    """One answer's mark. judge: model and prompt name. score: -1 if the judge named none. turn: from 1."""

    question_id: QuestionId
    model: str
    judge: tuple[str, str]
    user_prompt: str
    judgment: str
    score: float
    turn: int
    tstamp: float

    @property
    def key(self) -> tuple[object, ...]:
        """What makes it the same piece of work: a second run doesn't ask again."""
        return (self.question_id, self.model, self.turn, *self.judge)


class PairJudgment(_Row):
    """Two answers, judged twice: game 1 shows model_1 as A, game 2 as B."""

    question_id: QuestionId
    model_1: str
    model_2: str
    g1_winner: PairWinner
    g2_winner: PairWinner
    judge: tuple[str, str]
    g1_user_prompt: str
    g1_judgment: str
    g2_user_prompt: str
    g2_judgment: str
    turn: int
    tstamp: float

    @property
    def key(self) -> tuple[object, ...]:
        return (self.question_id, self.model_1, self.model_2, self.turn, *self.judge)


class _Turns(_Row):
    turns: tuple[str, ...]


class _ModelAnswer(_Row):
    question_id: QuestionId
    choices: tuple[_Turns, ...] = Field(default=())


Row = TypeVar("Row", bound=BaseModel)


def read_rows(path: Path, row: type[Row]) -> list[Row]:
    """All rows of a JSONL file; none if it doesn't exist. Raises ConfigError for a line that isn't such a row."""
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(row.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "the line"
                raise ConfigError(
                    f"{path}:{number} isn't in FastChat's format ({where}: {first['msg']}); correct or remove it."
                ) from error
    return rows


def read_turns(path: Path) -> dict[QuestionId, tuple[str, ...]]:
    """Question → the turns of its first choice, from an answer file of this project, EAGLE's or FastChat's.

    Questions without a choice (error rows) are left out. Raises ConfigError without such a file.
    """
    if not path.is_file():
        raise ConfigError(f"there is no answer file {path}; correct the path.")
    return {row.question_id: row.choices[0].turns for row in read_rows(path, _ModelAnswer) if row.choices}
