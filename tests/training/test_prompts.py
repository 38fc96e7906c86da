"""Held-out topics stay held out, and requests don't depend on what was made before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_mars.training.prompts import GreedyQuestions, Question, TrainingRequests, mentions_held_out_topic

HELD_OUT = Path(__file__).parents[2] / "evaluation" / "data" / "heldout_chat.jsonl"


def test_every_held_out_prompt_names_a_held_out_topic():
    prompts = [json.loads(line)["turns"][0] for line in HELD_OUT.read_text("utf-8").splitlines()]
    assert len(prompts) == 40
    assert [p for p in prompts if not mentions_held_out_topic(p)] == []


def test_no_given_question_names_one_and_no_first_one_repeats():
    given = [q.text for i in range(20_000) for q in TRAINING[i].questions if q.text]
    assert [text for text in given if mentions_held_out_topic(text)] == []
    first = [q.text for i in range(20_000) if not (q := TRAINING[i].questions[0]).is_open]
    assert len(first) > 2000
    assert len(set(first)) == len(first)


def test_most_first_questions_are_the_targets_own():
    first = [TRAINING[i].questions[0] for i in range(4000)]
    # Four standard errors of 4000 draws are .03.
    assert sum(q.is_open for q in first) / 4000 == pytest.approx(0.68, abs=0.03)
    assert sum(q == Question() for q in first) / 4000 == pytest.approx(0.46, abs=0.03)


def test_two_turns_and_long_answers_are_asked_for():
    requests = [TRAINING[i] for i in range(4000)]
    assert sum(len(r.questions) == 2 for r in requests) / 4000 == pytest.approx(0.4, abs=0.03)
    assert sum(r.max_answer_tokens > 512 for r in requests) / 4000 == pytest.approx(0.15, abs=0.03)


def test_requests_depend_on_seed_and_index_only():
    assert [TrainingRequests(0)[i] for i in (7, 3)] == [TRAINING[7], TRAINING[3]]
    assert [TrainingRequests(1)[i] for i in range(50)] != [TRAINING[i] for i in range(50)]


def test_evaluation_questions_are_greedy():
    questions = GreedyQuestions(HELD_OUT, 64)
    assert len(questions) == 40
    assert all(questions[i].temperature == 0 and questions[i].max_answer_tokens == 64 for i in range(40))


TRAINING = TrainingRequests(0)
