"""N-grams, and the near-duplicates that they show within the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

_ANSWER_NGRAM = 13
# One n-gram in four stands for all: which ones depends on the n-gram alone, so both copies of a text keep the same.
_KEEP_ONE_IN = 4
_MAX_SEEN_SHARE = 0.5


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
