"""The answer file: one JSON object a line, a superset of FastChat's `model_answer` format and of EAGLE's additions.

A line answers one question with all of its choices, or says why there is no answer:

    {"question_id": 81, "answer_id": "...", "model_id": "...", "tstamp": 1.7e9,
     "choices": [{"index": 0, "turns": ["text", "text"],               FastChat
                  "idxs": [9, 7], "new_tokens": [31, 24], "wall_time": [1.2, .9],     EAGLE
                  "stats": [{...}, {...}]}],                           one `TurnStats` per turn
     "error": null}

FastChat's and EAGLE's tools read such a file as it is, as long as it holds no error row: an error row has no choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from eagle_mars.errors import ConfigError
from eagle_mars.result import GenerationResult, Provenance

QuestionId = int | str

# How a token was accepted, one letter a token: a thousand tokens are a thousand characters.
LETTERS: dict[Provenance, str] = {"exact": "e", "relaxed": "r", "target": "t"}


class _Record(BaseModel):
    # allow: what another tool added to a line survives reading and writing it
    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())


class TurnStats(_Record):
    """What the decoding of one turn reports.

    prompt_tokens: the whole conversation so far, template included.
    token_ids: the new tokens, counted from ids: cut at the first stop token, which is included, and at the limit.
    provenance: one letter per token: `e` drafted and accepted exactly, `r` drafted and relaxed, `t` the target's own.
    accepted_lengths: accepted drafts of each cycle, uncut; empty for `ar`. tau is Σ(accepted + 1) / cycles.
    finish_reason: `stop` (stop token or stop string) or `length` (the limit).
    prefill_seconds: until the first token. decode_seconds: all the rest. Tokenising is in neither.
    relaxed: number of `r` tokens. exact_prefix: tokens before the first of them; all of them if there is none.
    regret: nats, Σ log p(top-1) - log p(accepted) over relaxed tokens. It and the three counts after it are of whole
    cycles, before any cut: low_margin (visited nodes with a low margin), rescued (rejections that relaxation turned
    into acceptances), nonpositive_top (nodes whose best logit was <= 0, where the ratio never relaxes).
    temperature, seed: what this turn was drawn with.
    """

    prompt_tokens: int = Field(ge=1)
    token_ids: tuple[int, ...]
    provenance: str = Field(pattern="^[ert]*$")
    accepted_lengths: tuple[NonNegativeInt, ...]
    finish_reason: Literal["stop", "length"]
    prefill_seconds: float = Field(ge=0)
    decode_seconds: float = Field(ge=0)
    relaxed: int
    exact_prefix: int
    regret: float
    low_margin: int
    rescued: int
    nonpositive_top: int
    temperature: float
    seed: int

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if len(self.provenance) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} token_ids, but provenance of {len(self.provenance)}")
        if self.relaxed != self.provenance.count("r"):
            raise ValueError(f"relaxed={self.relaxed}, but provenance has {self.provenance.count('r')}")
        return self

    @classmethod
    def of(cls, result: GenerationResult, *, temperature: float, seed: int) -> TurnStats:
        """The statistics of one response."""
        return cls(
            prompt_tokens=result.prompt_tokens,
            token_ids=result.token_ids,
            provenance="".join(LETTERS[kind] for kind in result.provenance),
            accepted_lengths=result.accepted_lengths,
            finish_reason=result.finish_reason,
            prefill_seconds=result.prefill_seconds,
            decode_seconds=result.decode_seconds,
            relaxed=result.relaxed,
            exact_prefix=result.exact_prefix_tokens,
            regret=result.regret,
            low_margin=result.low_margin,
            rescued=result.rescued,
            nonpositive_top=result.nonpositive_top,
            temperature=temperature,
            seed=seed,
        )

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def cycles(self) -> int:
        """Target forwards over a draft tree."""
        return len(self.accepted_lengths)


class Choice(_Record):
    """One sample of a question: all of its turns.

    turns: text per turn, without special tokens and stop strings, stripped as FastChat strips it.
    idxs: EAGLE's zero-based index of the last cycle, so cycles - 1; new_tokens, wall_time (seconds, prefill included):
    EAGLE's names for what `stats` says in full.
    """

    index: int = Field(ge=0)
    turns: tuple[str, ...]
    idxs: tuple[int, ...]
    new_tokens: tuple[int, ...]
    wall_time: tuple[float, ...]
    stats: tuple[TurnStats, ...]

    @model_validator(mode="after")
    def _one_entry_per_turn(self) -> Self:
        lengths = {len(part) for part in (self.turns, self.idxs, self.new_tokens, self.wall_time, self.stats)}
        if len(lengths) != 1:
            raise ValueError(f"choice {self.index} has lists of different lengths, where each has one entry a turn")
        return self

    @classmethod
    def of(cls, index: int, turns: Iterable[str], stats: Iterable[TurnStats]) -> Choice:
        """A choice whose EAGLE fields follow from `stats`."""
        stats = tuple(stats)
        return cls(
            index=index,
            turns=tuple(turns),
            idxs=tuple(max(s.cycles - 1, 0) for s in stats),
            new_tokens=tuple(s.new_tokens for s in stats),
            wall_time=tuple(s.seconds for s in stats),
            stats=stats,
        )


class Failure(_Record):
    """Why a question has no answer. kind: name of the exception. choice, turn: where it happened, from 0."""

    kind: str
    message: str
    choice: int
    turn: int


class Answer(_Record):
    """One line: the answer to a question, or (`error` set, no choices) its failure.

    model_id: FastChat's name for the arm, e.g. `smollm2-mars-0.9-temperature-1`. method: `ar` or the acceptance rule.
    bench_name: the task. category: the question's. tstamp: seconds since 1970.
    """

    question_id: QuestionId
    answer_id: str
    model_id: str
    bench_name: str
    category: str = ""
    method: str
    choices: tuple[Choice, ...]
    error: Failure | None = None
    tstamp: float

    @model_validator(mode="after")
    def _answer_or_error(self) -> Self:
        if (self.error is None) != bool(self.choices):
            raise ValueError("a row holds choices or an error, never both and never neither")
        return self


def read_answers(path: Path) -> list[Answer]:
    """All rows of an answer file in its order, error rows included; nothing is dropped but a failure that a later row
    of the same question mends or repeats (a resumed run tries failures again).

    Raises ConfigError if the file can't be read, a line is no answer row, the last line is torn (the run was killed:
    resume it) or a question is answered twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no answer file {path}; make one with python -m evaluation.run.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the answers in {path}: {error}") from error
    if text and not text.endswith("\n"):
        raise ConfigError(f"the last line of {path} is torn because the run was killed; resume it with its command.")
    rows: dict[QuestionId, Answer] = {}
    for number, line in enumerate(text.split("\n")[:-1], 1):  # splitlines would also cut at U+2028
        row = _parse(path, number, line)
        earlier = rows.pop(row.question_id, None)
        if earlier and earlier.error is None:
            raise ConfigError(f"{path}:{number} answers question {row.question_id} a second time; remove one of them.")
        rows[row.question_id] = row
    return list(rows.values())


def _parse(path: Path, number: int, line: str) -> Answer:
    try:
        return Answer.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the line"
        reason = f"{where}: {first['msg']}"
        raise ConfigError(f"{path}:{number} is no answer row ({reason}); see evaluation/answers.py.") from error
