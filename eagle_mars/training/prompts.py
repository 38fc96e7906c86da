"""What the target is asked: its own questions (Magpie) and templates over topics, never a held-out topic."""

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
_MAGPIE_SHARE = 0.65


def mentions_held_out_topic(text: str) -> bool:
    """Whether a question touches a topic that is kept for evaluation."""
    return _HELD_OUT.search(text) is not None


@dataclass(frozen=True)
class Request:
    """One sequence to generate. ``question`` None: the target writes it (Magpie)."""

    question: str | None
    temperature: float
    max_answer_tokens: int


class Requests(Protocol):
    """Requests by number."""

    def __getitem__(self, index: int) -> Request: ...


class TrainingRequests:
    """Request ``i`` as a pure function of (seed, i), so that any part of a run can be made again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        groups = json.loads(resources.files(__package__).joinpath("prompts.json").read_text("utf-8"))["groups"]
        # Weights, because some groups have few pairs and explanations would drown them.
        pools, weights = [_expand(group) for group in groups], [group["weight"] for group in groups]
        self._questions = _interleave(pools, weights, random.Random(f"{seed}/order"))

    def __getitem__(self, index: int) -> Request:
        rng = random.Random(f"{self._seed}/request/{index}")
        magpie = rng.random() < _MAGPIE_SHARE
        # Each (template, topic) pair is used once: greedy answers to a repeated prompt are duplicates.
        question = None if magpie or index >= len(self._questions) else self._questions[index]
        temperature = rng.choices(_TEMPERATURES, _TEMPERATURE_WEIGHTS)[0]
        return Request(question, temperature, rng.choice((160, 224, 288, 384)))


class GreedyQuestions:
    """Greedy answers to the first turns of an EAGLE-style question.jsonl: what a head is evaluated on."""

    def __init__(self, file: Path, max_answer_tokens: int) -> None:
        lines = file.read_text("utf-8").splitlines()
        self._requests = [Request(json.loads(line)["turns"][0], 0.0, max_answer_tokens) for line in lines]

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
