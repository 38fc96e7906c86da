"""What the target is asked: its own questions (Magpie), bare or after given first words, templates over topics, and
second turns; never a held-out topic."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

# Topics of evaluation/data/heldout_chat.jsonl: a question that names one is never trained on.
_HELD_OUT = re.compile(
    r"""\b(
        bees?\b | bee(hive|keep) | honey | volcan | tides?\b | refrigerat | fridge | rainbow | origami | lighthouse
        | sourdough | aquarium | kites?\b | snowm[ae]n | juggl | candle | palindrom | anagram | roman\ numeral
        | leap\ year | tic[-\ ]tac[-\ ]toe | caesar | picnic | balcon | parrot | ice-?breaker | lemon | lantern
        | scarecrow | penguin | carousel | bamboo | canoe | kayak | trumpet | trombone | hostel | guest\ ?house
        | marbles?\b | fenc | ferr(y|ies)\b | barks?\b | umbrella | bake\ sale
    )""",
    re.IGNORECASE | re.VERBOSE,
)

_TEMPERATURES, _TEMPERATURE_WEIGHTS = (0.0, 0.7, 1.0), (0.62, 0.26, 0.12)
_ANSWER_TOKENS, _ANSWER_WEIGHTS = (160, 224, 288, 384, 640), (0.2, 0.2, 0.2, 0.25, 0.15)
# Two of three first turns are the target's own, more than half of them without a word from us.
_KINDS, _KIND_WEIGHTS = ("magpie", "opened", "template"), (0.46, 0.22, 0.32)
# A third of the answers end before their limit; only those get a second turn.
_DIALOGUE_SHARE = 0.4


def mentions_held_out_topic(text: str) -> bool:
    """Whether a question touches a topic that is kept for evaluation."""
    return _HELD_OUT.search(text) is not None


@dataclass(frozen=True)
class Question:
    """A user turn. Open: the target goes on writing after ``text`` (Magpie, where ``text`` is empty)."""

    text: str = ""
    is_open: bool = True


@dataclass(frozen=True)
class Request:
    """One sequence to generate: its user turns, of which each but the first waits for the answer before to end."""

    questions: tuple[Question, ...]
    temperature: float
    max_answer_tokens: int


class Requests(Protocol):
    """Requests by number."""

    def __getitem__(self, index: int) -> Request: ...


class TrainingRequests:
    """Request ``i`` as a pure function of (seed, i), so that any part of a run can be made again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        recipe = json.loads(resources.files(__package__).joinpath("prompts.json").read_text("utf-8"))
        self._openings, self._follow_ups = recipe["openings"], recipe["follow_ups"]
        # Weights, because some groups have few pairs and explanations would drown them.
        pools, weights = [_expand(group) for group in recipe["groups"]], [group["weight"] for group in recipe["groups"]]
        self._templates = _interleave(pools, weights, random.Random(f"{seed}/order"))

    def __getitem__(self, index: int) -> Request:
        rng = random.Random(f"{self._seed}/request/{index}")
        questions = [self._first(index, rng)]
        if rng.random() < _DIALOGUE_SHARE:
            questions.append(rng.choice([Question(), Question(rng.choice(self._follow_ups), is_open=False)]))
        temperature = rng.choices(_TEMPERATURES, _TEMPERATURE_WEIGHTS)[0]
        return Request(tuple(questions), temperature, rng.choices(_ANSWER_TOKENS, _ANSWER_WEIGHTS)[0])

    def _first(self, index: int, rng: random.Random) -> Question:
        kind = rng.choices(_KINDS, _KIND_WEIGHTS)[0]
        if kind == "template" and index < len(self._templates):
            # Each (template, topic) pair is used once: greedy answers to a repeated prompt are duplicates.
            return Question(self._templates[index], is_open=False)
        return Question(rng.choice(self._openings)) if kind == "opened" else Question()


class GreedyQuestions:
    """Greedy answers to the first turns of an EAGLE-style question.jsonl: what a head is evaluated on."""

    def __init__(self, file: Path, max_answer_tokens: int) -> None:
        lines = file.read_text("utf-8").splitlines()
        first_turns = [Question(json.loads(line)["turns"][0], is_open=False) for line in lines]
        self._requests = [Request((question,), 0.0, max_answer_tokens) for question in first_turns]

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]


def _expand(group: dict[str, Any]) -> list[str]:
    return [template.replace("{x}", topic) for template in group["templates"] for topic in group["topics"]]


def _interleave(pools: list[list[str]], weights: list[float], rng: random.Random) -> list[str]:
    for pool in pools:
        rng.shuffle(pool)
    order: list[str] = []
    while any(pools):
        left = [weight if pool else 0.0 for weight, pool in zip(weights, pools, strict=True)]
        order.append(rng.choices(pools, left)[0].pop())
    return order
