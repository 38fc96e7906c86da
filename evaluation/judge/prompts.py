"""Judge prompts in FastChat's format, and what a judge's text says.

The project's own prompts are in prompts.jsonl. Marks are comparable only under the same prompts: to compare with
published MT-Bench marks, give FastChat's judge_prompts.jsonl.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle_mars.errors import ConfigError
from evaluation.data.questions import Question

OWN = Path(__file__).parent / "prompts.jsonl"
Mode = Literal["single", "pairwise"]
Winner = Literal["A", "B", "tie", "error"]

# Where FastChat shows the judge a reference answer.
REFERENCED = ("math", "reasoning", "coding")
UNPARSED = -1.0
_RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")
_LOOSE_RATING = re.compile(r"\[(\d+(?:\.\d+)?)\]")
_VERDICT = re.compile(r"\[\[([ABC])\]\]")


class JudgePrompt(BaseModel):
    """One prompt. What it is for follows from its placeholders: `ref_answer_1` wants a reference, `question_2` is for
    the second turn."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    type: Mode
    system_prompt: str
    prompt_template: str

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(name for _, name, _, _ in Formatter().parse(self.prompt_template) if name)

    @property
    def for_second_turn(self) -> bool:
        return "question_2" in self.fields

    @property
    def wants_reference(self) -> bool:
        return "ref_answer_1" in self.fields

    def fill(self, values: Mapping[str, str]) -> str:
        """The judge's user message."""
        return self.prompt_template.format(**{name: values[name] for name in self.fields})


def read_prompts(path: Path = OWN) -> list[JudgePrompt]:
    """Raises ConfigError if the file can't be read or isn't in FastChat's format."""
    try:
        lines = path.read_text("utf-8").split("\n")
        return [JudgePrompt.model_validate_json(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise ConfigError(f"{path} holds no judge prompts ({reason}); give a file like judge_prompts.jsonl.") from error


def choose_prompt(prompts: Sequence[JudgePrompt], mode: Mode, turn: int, referenced: bool) -> JudgePrompt:
    """The prompt for a turn (1 or 2), with a reference or without. Raises ConfigError if there is none."""
    for prompt in prompts:
        if (prompt.type, prompt.for_second_turn, prompt.wants_reference) == (mode, turn == 2, referenced):
            return prompt
    kind = "with" if referenced else "without"
    raise ConfigError(f"the judge prompts have none of type {mode} for turn {turn} {kind} a reference; add one.")


def referenced(question: Question, reference: Sequence[str] | None) -> bool:
    """Whether the judge sees a reference: it exists for every turn, and the category has right answers."""
    return bool(reference) and len(reference or ()) >= len(question.turns) and question.category in REFERENCED


def rating(judgment: str) -> float:
    """The mark in a judgment; -1, FastChat's sign, if it names none."""
    found = _RATING.findall(judgment) or _LOOSE_RATING.findall(judgment)
    return float(found[-1]) if found else UNPARSED


def verdict(judgment: str) -> Winner:
    """The winner that a judgment names; `error` if it names none, or several."""
    named = set(_VERDICT.findall(judgment))
    if len(named) != 1:
        return "error"
    letter = named.pop()
    return "tie" if letter == "C" else letter
