"""How close the target's two best tokens were: what explains greedy answers that part without any relaxation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from eagle_mars import EaModel
from evaluation.answers import Answer
from evaluation.data.questions import Question
from evaluation.models import Conversations, load_pair
from evaluation.record import read_settings
from evaluation.settings import RunSettings


class Gaps:
    """The target of a run, asked again at a position of one of its answers."""

    def __init__(self, ea: EaModel, settings: RunSettings, questions: Sequence[Question]) -> None:
        self._ea = ea
        self._conversations = Conversations(ea, settings.model)
        self._questions = {question.question_id: question for question in questions}

    @classmethod
    def of_run(cls, answer_file: Path, questions: Sequence[Question], device: str = "cpu") -> Self:
        """Load the pair that the record beside the answers names. Raises ConfigError without a record."""
        settings = read_settings(answer_file)
        return cls(load_pair(settings.model, device), settings, questions)

    def at(self, answer: Answer, choice: int, turn: int, position: int) -> float:
        """Nats between the two best logits for the token at `position` (from 0) of that turn."""
        told = answer.choices[choice]
        messages: list[dict[str, str]] = []
        for index, text in enumerate(self._questions[answer.question_id].turns[: turn + 1]):
            messages.append({"role": "user", "content": text})
            if index < turn:
                messages.append({"role": "assistant", "content": told.turns[index]})
        prompt = self._conversations.ids(messages)
        return top2_gap(self._ea, torch.cat((prompt, torch.tensor([told.stats[turn].token_ids[:position]])), dim=1))


@torch.inference_mode()
def top2_gap(ea: EaModel, ids: Tensor) -> float:
    """Nats between the two best logits for the token after ids [1, L]."""
    best = ea.base_model(ids.to(ea.device).long(), logits_to_keep=1).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])
