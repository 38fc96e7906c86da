"""HumanEval's own file beside EAGLE's questions, which leave the tests out."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

from eagle_mars.errors import ConfigError
from evaluation.data.questions import Question

_FIELDS = ("task_id", "prompt", "entry_point", "canonical_solution", "test")


def with_problems(questions: Sequence[Question], path: Path) -> list[Question]:
    """Questions completed from HumanEval.jsonl or HumanEval.jsonl.gz, found by the prompt that their turn ends with:
    EAGLE's subset is numbered differently.

    Raises ConfigError if the file can't be read or a question's prompt isn't in it.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows = [json.loads(line) for line in content.decode().split("\n") if line.strip()]
        by_prompt = {row["prompt"].strip(): {name: row[name] for name in _FIELDS} for row in rows}
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} isn't HumanEval's problem file ({error!r}); give HumanEval.jsonl.gz.") from error
    completed = []
    for question in questions:
        turn = question.turns[-1].strip()
        found = next((fields for prompt, fields in by_prompt.items() if turn.endswith(prompt)), None)
        if found is None:
            raise ConfigError(f"question {question.question_id} ends with no prompt of {path}; are they HumanEval's?")
        completed.append(question.model_copy(update=found))
    return completed
