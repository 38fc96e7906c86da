"""Proof that evaluation questions are not in a head's data: no run of words occurs in both."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.ngrams import ngrams
from eagle_mars.training.rows import ChatFrame
from eagle_mars.training.shards import Source

# Thirteen words is what GPT-3's data was cleaned by. A question is short, so less of one gives it away; answers share
# eight words of plain English ("please let me know if you have any") with anything.
QUESTION_WORDS, ANSWER_WORDS = 8, 13
_WORD = re.compile(r"\w+")


class Overlap:
    """Finds what texts have in common with a list of questions: ``n`` words in a row, case and punctuation aside.

    A question of fewer words is found where a text consists of just these.
    """

    def __init__(self, questions: Iterable[str], n: int) -> None:
        self._n = n
        self._runs: set[tuple[str, ...]] = set()
        for question in questions:
            self._runs |= self._runs_of(question)

    def find(self, text: str) -> str | None:
        """A run of words of ``text`` that a question has too, or None."""
        hits = self._runs_of(text) & self._runs
        return " ".join(min(hits)) if hits else None

    def _runs_of(self, text: str) -> set[tuple[str, ...]]:
        words = _WORD.findall(text.lower())
        return ngrams(words, min(self._n, len(words))) if words else set()


@dataclass(frozen=True)
class Finding:
    """One turn of the data that shares ``run`` with a question of ``file``."""

    file: Path
    is_answer: bool
    run: str
    text: str


def check(dataset: ShardDataset, tokenizer: PreTrainedTokenizerBase, files: list[Path]) -> list[Finding]:
    """All turns of ``dataset`` that overlap with a turn of a question.jsonl: user turns by 8 words, answers by 13."""
    by_file = [(file, list(_questions(file))) for file in files]
    searches = [
        (file, Overlap(questions, QUESTION_WORDS), Overlap(questions, ANSWER_WORDS)) for file, questions in by_file
    ]
    findings = []
    for is_answer, text in _turns(dataset, tokenizer):
        for file, in_questions, in_answers in searches:
            if run := (in_answers if is_answer else in_questions).find(text):
                findings.append(Finding(file, is_answer, run, text))
    return findings


def _questions(file: Path) -> Iterator[str]:
    for line in file.read_text("utf-8").splitlines():
        yield from json.loads(line)["turns"]


def _turns(dataset: ShardDataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[bool, str]]:
    """(is an answer, text) of every turn, the chat template's own words left out."""
    frame = ChatFrame.of(tokenizer, frozenset())
    for entry in dataset.entries:
        tokens, source = (x.tolist() for x in dataset.tokens(entry))
        pairs = zip((s >= Source.SAMPLED for s in source), tokens, strict=True)
        for is_answer, run in groupby(pairs, key=lambda pair: pair[0]):
            ids = [token for _, token in run]
            if not is_answer:
                start = len(frame.prefix) if ids[: len(frame.prefix)] == frame.prefix else len(frame.between) - 1
                ids = ids[start : len(ids) - len(frame.suffix)]
            yield is_answer, str(tokenizer.decode(ids, skip_special_tokens=True))
