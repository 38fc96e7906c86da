"""One sequence in flight: what it was asked, what it holds, and when it ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from transformers import PreTrainedTokenizerBase

from eagle_mars.training.prompts import Request, mentions_held_out_topic
from eagle_mars.training.shards import Source

MAX_QUESTION_TOKENS = 96
_MIN_QUESTION_TOKENS = 4
_QUESTION_TEMPERATURE = 0.85
_LOOP_NGRAM = 16
_SENTINEL = "QUESTION"


class Fate(Enum):
    """What becomes of a row after a token."""

    GOES_ON = auto()
    DONE = auto()
    DROPPED = auto()


@dataclass(frozen=True)
class ChatFrame:
    """Token ids around a user's question: prefix + question + suffix is a prompt. stop: ids that end a turn."""

    prefix: list[int]
    suffix: list[int]
    stop: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, stop: frozenset[int]) -> ChatFrame:
        messages = [{"role": "user", "content": _SENTINEL}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        before, after = text.split(_SENTINEL)
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return cls(encode(before), encode(after), stop)


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

    def __post_init__(self) -> None:
        self._extend(self.frame.prefix, Source.PROMPT)
        if self.request.question is not None:
            self._extend(self.tokenizer.encode(self.request.question, add_special_tokens=False), Source.PROMPT)
            self._begin_answer(self.frame.suffix)

    @property
    def temperature(self) -> float:
        return _QUESTION_TEMPERATURE if self.kind is Source.QUESTION else self.request.temperature

    def append(self, token: int) -> Fate:
        """Take a drawn token. The end of a question that the target wrote is followed by the answer's prompt."""
        self._extend([token], self.kind)
        drawn = self.tokens[self.source.index(self.kind) :]
        if self.kind is not Source.QUESTION:
            full = len(drawn) >= self.request.max_answer_tokens or len(self.tokens) >= self.max_length
            return Fate.DONE if full or token in self.frame.stop or loops(drawn) else Fate.GOES_ON
        closed = token in self.frame.stop or token == self.frame.suffix[0]
        if not closed and len(drawn) < MAX_QUESTION_TOKENS:
            return Fate.GOES_ON
        question = str(self.tokenizer.decode(drawn[:-1] if closed else drawn))
        if len(drawn) < _MIN_QUESTION_TOKENS or mentions_held_out_topic(question):
            return Fate.DROPPED
        self._begin_answer(self.frame.suffix[1:] if closed else self.frame.suffix)
        return Fate.GOES_ON

    def _begin_answer(self, suffix: list[int]) -> None:
        self._extend(suffix, Source.PROMPT)
        self.kind = Source.GREEDY if self.request.temperature == 0 else Source.SAMPLED

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
