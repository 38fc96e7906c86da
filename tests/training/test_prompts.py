"""Held-out topics stay held out, and requests don't depend on what was made before."""

from __future__ import annotations

import json
from pathlib import Path

from eagle_mars.training.prompts import GreedyQuestions, TrainingRequests, mentions_held_out_topic

HELD_OUT = Path(__file__).parents[2] / "evaluation" / "data" / "heldout_chat.jsonl"


def test_every_held_out_prompt_names_a_held_out_topic():
    prompts = [json.loads(line)["turns"][0] for line in HELD_OUT.read_text("utf-8").splitlines()]
    assert len(prompts) == 40
    assert [p for p in prompts if not mentions_held_out_topic(p)] == []


def test_no_training_question_names_one_and_none_repeats():
    questions = [q for i in range(20_000) if (q := TRAINING[i].question) is not None]
    assert len(questions) > 2000
    assert [q for q in questions if mentions_held_out_topic(q)] == []
    assert len(set(questions)) == len(questions)


def test_most_questions_are_the_targets_own():
    own = sum(TRAINING[i].question is None for i in range(4000)) / 4000
    assert 0.62 < own < 0.68  # share .65; four standard errors of 4000 draws are .03


def test_requests_depend_on_seed_and_index_only():
    assert [TrainingRequests(0)[i] for i in (7, 3)] == [TRAINING[7], TRAINING[3]]
    assert [TrainingRequests(1)[i] for i in range(50)] != [TRAINING[i] for i in range(50)]


def test_evaluation_questions_are_greedy():
    questions = GreedyQuestions(HELD_OUT, 64)
    assert len(questions) == 40
    assert all(questions[i].temperature == 0 and questions[i].max_answer_tokens == 64 for i in range(40))


TRAINING = TrainingRequests(0)
