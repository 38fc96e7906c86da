"""What a row makes of the tokens that the target draws: turns, ends, and what is thrown away."""

from __future__ import annotations

import itertools
import random

import pytest

from eagle_mars.training import rows
from eagle_mars.training.prompts import Question, Request
from eagle_mars.training.rows import ChatFrame, Fate, Row
from eagle_mars.training.shards import Source
from tests.training.conftest import EOS

START = 2  # "<s>"
PROMPT, QUESTION, GREEDY = Source.PROMPT, Source.QUESTION, Source.GREEDY


@pytest.fixture
def make_row(tokenizer):
    def make(*questions: Question, max_length: int = 256) -> Row:
        frame = ChatFrame.of(tokenizer, frozenset([EOS]))
        return Row(0, Request(questions, 0.0, 8), frame, tokenizer, random.Random(0), max_length)

    return make


def test_two_turns_are_the_chat_template(make_row, tokenizer):
    row = make_row(Question("ab", is_open=False), Question())
    first = [row.append(t) for t in [*tokenizer.encode("yes"), EOS]]
    assert {*first} == {Fate.GOES_ON}
    asked = [row.append(t) for t in [*tokenizer.encode("more"), EOS]]
    answered = [row.append(t) for t in [*tokenizer.encode("no"), EOS]]
    assert {*asked, *answered[:-1]} == {Fate.GOES_ON}
    assert answered[-1] is Fate.DONE
    turns = zip(("user", "assistant", "user", "assistant"), ("ab", "yes", "more", "no"), strict=True)
    messages = [{"role": role, "content": text} for role, text in turns]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert row.tokens == tokenizer.encode(text)
    assert row.source == [PROMPT] * 5 + [GREEDY] * 4 + [PROMPT] + [QUESTION] * 5 + [PROMPT] + [GREEDY] * 3


def test_first_words_are_given_and_the_rest_is_drawn(make_row, tokenizer):
    row = make_row(Question("abc"))
    for token in [*tokenizer.encode("de"), EOS]:
        row.append(token)
    assert row.source == [PROMPT] * 4 + [QUESTION] * 3 + [PROMPT]
    assert row.kind is GREEDY


def test_a_held_out_topic_in_the_given_words_counts(make_row, tokenizer, monkeypatch):
    monkeypatch.setattr(rows, "mentions_held_out_topic", lambda question: question == "abcde")
    row = make_row(Question("abc"))
    fates = [row.append(t) for t in [*tokenizer.encode("de"), EOS]]
    assert fates == [Fate.GOES_ON, Fate.GOES_ON, Fate.DROPPED]


def test_a_second_question_that_may_not_be_used_leaves_the_first_turn(make_row, tokenizer, monkeypatch):
    monkeypatch.setattr(rows, "mentions_held_out_topic", lambda question: True)
    row = make_row(Question("ab", is_open=False), Question())
    for token in [*tokenizer.encode("yes"), EOS, *tokenizer.encode("more")]:
        assert row.append(token) is Fate.GOES_ON
    assert row.append(EOS) is Fate.DONE
    assert row.tokens == tokenizer.encode("<s>ab<e><s>yes<e>")
    assert len(row.source) == len(row.tokens)


@pytest.mark.parametrize(("answer", "max_length"), [("abcdefgh", 256), ("yes<e>", 105)])
def test_no_second_turn_after_an_unfinished_answer_or_without_room(make_row, tokenizer, answer, max_length):
    row = make_row(Question("ab", is_open=False), Question(), max_length=max_length)
    assert [row.append(t) for t in tokenizer.encode(answer)][-1] is Fate.DONE


@pytest.mark.parametrize(
    ("answer", "loops"),
    [
        (list(range(64)), False),
        ([1, 2, 3, 4] * 12, True),
        (list(itertools.chain(range(16), range(30, 46), range(16), range(60, 76))), False),
        (list(range(24)) * 4, True),
    ],
)
def test_loops_are_noticed(answer, loops):
    assert any(rows.loops(answer[: n + 1]) for n in range(len(answer))) is loops
