"""N-grams of words and tokens: near-duplicates within the data, and overlap of the data with evaluation questions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_WORD = re.compile(r"\w+")
_ANSWER_NGRAM = 13
# One n-gram in four stands for all: which ones depends on the n-gram alone, so both copies of a text keep the same.
_KEEP_ONE_IN = 4
_MAX_SEEN_SHARE = 0.5


def words(text: str) -> list[str]:
    """Lower-case words without punctuation: what an overlap is counted in."""
    return _WORD.findall(text.lower())


def ngrams(items: Sequence[T], n: int) -> set[tuple[T, ...]]:
    """All runs of ``n`` items; none if there are fewer."""
    return {tuple(items[i : i + n]) for i in range(len(items) - n + 1)}


class Deduplicator:
    """Tells whether a sequence teaches something new; what it has let through is remembered.

    A duplicate repeats the questions of an earlier sequence, or more than half of its answer's 13-grams have been seen:
    greedy answers to questions that differ in a word often are the same text.
    """

    def __init__(self) -> None:
        self._questions: set[int] = set()
        self._answers: set[int] = set()

    def is_new(self, question: Iterable[int], answer: Sequence[int]) -> bool:
        """question, answer: token ids of all turns. An answer shorter than an n-gram is judged by its question only."""
        key = hash(tuple(question))
        grams = {h for gram in ngrams(answer, _ANSWER_NGRAM) if (h := hash(gram)) % _KEEP_ONE_IN == 0}
        if key in self._questions or len(grams & self._answers) > _MAX_SEEN_SHARE * max(len(grams), 1):
            return False
        self._questions.add(key)
        self._answers |= grams
        return True


class Overlap:
    """Finds what texts have in common with a list of questions: ``n`` words in a row.

    A question of fewer words is found where a text consists of just these.
    """

    def __init__(self, questions: Iterable[str], n: int) -> None:
        self._n = n
        self._runs: set[tuple[str, ...]] = set()
        for question in questions:
            parts = words(question)
            self._runs |= ngrams(parts, min(n, max(len(parts), 1)))

    def find(self, text: str) -> str | None:
        """A run of words of ``text`` that a question has too, or None."""
        parts = words(text)
        runs = ngrams(parts, self._n) if len(parts) >= self._n else {tuple(parts)}
        hits = runs & self._runs
        return " ".join(min(hits)) if hits else None
