"""Prompts from a file."""

from __future__ import annotations

import json
from pathlib import Path

from eagle_mars.errors import ConfigError


def read_prompts(path: Path) -> list[str]:
    """First turns of EAGLE's `question.jsonl`, or one prompt a line (anything that isn't .jsonl).

    Raises ConfigError if the file can't be read or a line isn't a question.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines would also cut at U+2028
    except FileNotFoundError:
        raise ConfigError(f"there is no prompt file {path}; correct the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the prompts in {path}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{path} holds no prompt; write one a line.")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_first_turn(path, number, line) for number, line in numbered]


def _first_turn(path: Path, number: int, line: str) -> str:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, KeyError, TypeError):
        turns = None
    if not (isinstance(turns, list) and turns and isinstance(turns[0], str)):
        raise ConfigError(f'{path}:{number} is no question; a line looks like {{"question_id": 1, "turns": ["..."]}}.')
    return turns[0]
