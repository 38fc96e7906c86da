"""Overlap with references: ROUGE-L by rouge-score, BLEU and chrF by sacrebleu, with the settings they were made with.

ROUGE-L: F-measure without stemming, the best over the references, averaged over questions; in 0..1.
BLEU, chrF: of the whole corpus, sacrebleu's defaults (13a, mixed case; chrF2), in 0..100. One sentence's BLEU means
little, so only chrF can be compared question by question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF


@dataclass(frozen=True)
class CorpusScore:
    """A score with sacrebleu's signature, without which it can't be compared."""

    score: float
    signature: str


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """ROUGE-L F-measure of one answer, 0..1; 0 for an empty answer."""
    return max(_scorer().score(reference, answer)["rougeL"].fmeasure for reference in references)


def mean_rouge_l(answers: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean over questions; an empty answer counts as 0. Raises ValueError without any."""
    _check(answers, references)
    return fmean(rouge_l(answer, given) for answer, given in zip(answers, references, strict=True))


def bleu(answers: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScore:
    """Corpus BLEU, 0..100. references: one or more per answer. Raises ValueError without any."""
    metric = BLEU()
    score = metric.corpus_score(list(answers), _streams(answers, references)).score
    return CorpusScore(score, str(metric.get_signature()))


def chrf(answers: Sequence[str], references: Sequence[Sequence[str]]) -> CorpusScore:
    """Corpus chrF2, 0..100. Raises ValueError without answers."""
    metric = CHRF()
    score = metric.corpus_score(list(answers), _streams(answers, references)).score
    return CorpusScore(score, str(metric.get_signature()))


def sentence_chrf(answer: str, references: Sequence[str]) -> float:
    """chrF2 of one answer, 0..100."""
    return CHRF().sentence_score(answer, list(references)).score


@cache
def _scorer() -> RougeScorer:
    return RougeScorer(["rougeL"])


def _check(answers: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not answers:
        raise ValueError("there are no answers to score")
    if len(answers) != len(references) or not all(references):
        raise ValueError("each answer needs at least one reference")


def _streams(answers: Sequence[str], references: Sequence[Sequence[str]]) -> list[list[str]]:
    """sacrebleu's layout: the n-th references of all answers together, "" (which it ignores) where one has fewer."""
    _check(answers, references)
    width = max(map(len, references))
    return [[given[n] if n < len(given) else "" for given in references] for n in range(width)]
