"""What counts as a duplicate, and what counts as an evaluation question in the data."""

from __future__ import annotations

import json

import pytest

from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.ngrams import Deduplicator
from eagle_mars.training.overlap import Overlap, check

QUESTION = "Why do cats, unlike dogs, land on their feet when they fall?"


def test_a_repeated_question_and_a_copied_answer_are_duplicates():
    deduplicator = Deduplicator()
    text = list(range(1000, 1200))
    assert deduplicator.is_new([1, 2], text)
    assert not deduplicator.is_new([1, 2], list(range(200)))
    assert not deduplicator.is_new([1, 3], text)
    assert not deduplicator.is_new([1, 4], [7, 8, *text[:150], 9])
    # Half its length, but less than half of its n-grams.
    assert deduplicator.is_new([1, 5], [*text[:90], *range(110)])
    assert deduplicator.is_new([1, 6], [5])


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("Tell me: why do Cats unlike dogs LAND on their heads", "cats unlike dogs land on their"),
        ("Why do cats unlike dogs", None),
        ("what is love", "what is love"),
        ("So, what is love?", None),
        ("", None),
    ],
)
def test_overlap_is_six_words_or_a_whole_short_question(text, run):
    found = Overlap([QUESTION, "What is love?"], 6).find(text)
    assert found == run


def test_the_check_finds_a_question_given_and_one_written(shards, tokenizer, tmp_path):
    dataset = ShardDataset(shards)
    written = next(e for e in dataset.entries if 1 in dataset.tokens(e)[1].tolist())
    tokens, source = dataset.tokens(written)
    by_target = tokenizer.decode(tokens[source == 1].tolist(), skip_special_tokens=True)
    file = tmp_path / "question.jsonl"
    lines = [{"turns": ["something else", text]} for text in ("abc3", by_target)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    found = {finding.text for finding in check(dataset, tokenizer, [file])}
    assert "abc3" in found
    assert any(by_target in text for text in found)
    file.write_text(json.dumps({"turns": ["abc", "none of this"]}), "utf-8")
    assert check(dataset, tokenizer, [file]) == []
