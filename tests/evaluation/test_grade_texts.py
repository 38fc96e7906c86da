"""ROUGE-L, BLEU and chrF: the libraries' numbers, on cases small enough to compute by hand."""

from __future__ import annotations

import pytest

from evaluation.graders.texts import bleu, chrf, mean_rouge_l, rouge_l, sentence_chrf


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    # LCS "the cat mat" = 3 words; precision 3/4, recall 3/6, F = 2PR / (P + R) = .6
    assert rouge_l("the cat was mat", ["the cat sat on the mat"]) == pytest.approx(0.6)
    assert (
        rouge_l("the cat was mat", ["a dog", "The cat, was mat!"]) == 1
    )  # the best reference; case and marks are free
    assert rouge_l("", ["a dog"]) == 0
    assert mean_rouge_l(["a dog", ""], [["a dog"], ["a dog"]]) == 0.5


def test_bleu_of_identical_and_of_unrelated_text() -> None:
    sentence = "the quick brown fox jumps over the lazy dog"
    assert bleu([sentence], [[sentence]]).score == pytest.approx(100)
    assert bleu(["nothing shared here at all"], [[sentence]]).score < 5  # sacrebleu smooths zero counts
    assert "tok:13a" in bleu([sentence], [[sentence]]).signature
    assert "nrefs:1" in bleu([sentence], [[sentence]]).signature


def test_answers_may_have_different_numbers_of_references() -> None:
    first, second = "a small red house stands there", "two birds sing in the tree"
    both = bleu([first, second], [["something else entirely now", first], [second]])
    assert both.score == pytest.approx(100)
    assert chrf([first, second], [["else", first], [second]]).score == pytest.approx(100)
    assert sentence_chrf(first, [first]) == pytest.approx(100)
    assert sentence_chrf("xyz", [first]) == 0


@pytest.mark.parametrize("score", [bleu, chrf, mean_rouge_l])
def test_no_answers_and_no_references_give_no_number(score) -> None:
    with pytest.raises(ValueError, match="no answers"):
        score([], [])
    with pytest.raises(ValueError, match="at least one reference"):
        score(["a"], [[]])
