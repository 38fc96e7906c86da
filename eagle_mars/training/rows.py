"""One sequence in flight: what it was asked, what it holds, and when it ends."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from transformers import PreTrainedTokenizerBase

from eagle_mars.training.prompts import Question, Request, mentions_held_out_topic
from eagle_mars.training.shards import Source

MAX_QUESTION_TOKENS = 96
_MIN_QUESTION_TOKENS = 4
_QUESTION_TEMPERATURE = 0.85
_LOOP_NGRAM = 16
_SENTINELS = ("FIRST", "ANSWER", "SECOND")


class Fate(Enum):
    """What becomes of a row after a token."""

    GOES_ON = auto()
    DONE = auto()
    DROPPED = auto()


@dataclass(frozen=True)
class ChatFrame:
    """Token ids of the chat template: prefix, question, suffix, answer, between, question, suffix, answer …

    stop: ids that end a turn.
    """

    prefix: list[int]
    suffix: list[int]
    between: list[int]
    stop: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, stop: frozenset[int]) -> ChatFrame:
        messages = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant", "user"), _SENTINELS, strict=True)
        ]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        prefix, _, between, suffix = re.split("|".join(_SENTINELS), text)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return cls(encode(prefix), encode(suffix), encode(between), stop)


@dataclass
class Row:
    """Tokens of one request so far, prompt first; ``kind`` is the Source of the next token that is drawn."""

    index: int
    request: Request
    frame: ChatFrame
    tokenizer: PreTrainedTokenizerBase
    rng: random.Random
    max_length: int
    tokens: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    kind: Source = Source.QUESTION
    _turn: int = 0
    _turn_start: int = 0  # of the question or answer that is being written, its given words included
    _complete: int = 0  # tokens up to the end of the last whole answer

    def __post_init__(self) -> None:
        self._extend(self.frame.prefix, Source.PROMPT)
        self._ask(self.request.questions[0])

    @property
    def temperature(self) -> float:
        return _QUESTION_TEMPERATURE if self.kind is Source.QUESTION else self.request.temperature

    def append(self, token: int) -> Fate:
        """Take a drawn token. What ends a turn is followed by the template's tokens before the next one."""
        self._extend([token], self.kind)
        written = self.tokens[self._turn_start :]
        if self.kind is Source.QUESTION:
            return self._after_question_token(written)
        full = len(written) >= self.request.max_answer_tokens or len(self.tokens) >= self.max_length
        if not (full or token in self.frame.stop or loops(written)):
            return Fate.GOES_ON
        self._complete = len(self.tokens)
        if token == self.frame.between[0] and self._turn + 1 < len(self.request.questions) and self._has_room():
            self._turn += 1
            self._extend(self.frame.between[1:], Source.PROMPT)
            self._ask(self.request.questions[self._turn])
            return Fate.GOES_ON
        return Fate.DONE

    def _after_question_token(self, written: list[int]) -> Fate:
        closed = written[-1] in self.frame.stop or written[-1] == self.frame.suffix[0]
        if not closed and len(written) < MAX_QUESTION_TOKENS:
            return Fate.GOES_ON
        question = str(self.tokenizer.decode(written[:-1] if closed else written))
        if len(written) >= _MIN_QUESTION_TOKENS and not mentions_held_out_topic(question):
            self._begin_answer(self.frame.suffix[1:] if closed else self.frame.suffix)
            return Fate.GOES_ON
        del self.tokens[self._complete :], self.source[self._complete :]
        return Fate.DONE if self.tokens else Fate.DROPPED

    def _has_room(self) -> bool:
        longest = len(self.frame.between) + MAX_QUESTION_TOKENS + len(self.frame.suffix)
        return len(self.tokens) + longest < self.max_length

    def _ask(self, question: Question) -> None:
        self.kind, self._turn_start = Source.QUESTION, len(self.tokens)
        self._extend(self.tokenizer.encode(question.text, add_special_tokens=False), Source.PROMPT)
        if not question.is_open:
            self._begin_answer(self.frame.suffix)

    def _begin_answer(self, suffix: list[int]) -> None:
        self._extend(suffix, Source.PROMPT)
        self.kind = Source.GREEDY if self.request.temperature == 0 else Source.SAMPLED
        self._turn_start = len(self.tokens)

    def _extend(self, ids: list[int], kind: Source) -> None:
        self.tokens += ids
        self.source += [kind] * len(ids)


def loops(answer: list[int]) -> bool:
    """Whether the last few tokens already occurred twice before in this answer; looked at every so many tokens."""
    if len(answer) % _LOOP_NGRAM or len(answer) < 3 * _LOOP_NGRAM:
        return False
    tail = answer[-_LOOP_NGRAM:]
    starts = (i for i, token in enumerate(answer[:-_LOOP_NGRAM]) if token == tail[0])
    return sum(answer[i : i + _LOOP_NGRAM] == tail for i in starts) >= 2
