"""Answering one question: all choices, all turns, each turn after the answers before it."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import islice

import torch

from eagle_mars import EaModel, GenerationResult
from eagle_mars.errors import EagleMarsError
from eagle_mars.model import Method
from evaluation import controls
from evaluation.answers import Answer, Choice, Failure, TurnStats
from evaluation.data.questions import Question
from evaluation.models import Conversations
from evaluation.settings import RunSettings

# Failures of one question, which the others needn't share; anything else is a defect and ends the run.
_FAILURES = (EagleMarsError, torch.OutOfMemoryError)
_NAMESPACE = uuid.UUID("6a9f2d0e-4d6c-5c1b-9c0e-2b7f0c0a5e11")


_Work = Generator[None, None, Answer]


class Answerer:
    """A pair under fixed settings. Its answers depend on the question and the settings only."""

    def __init__(self, ea: EaModel, settings: RunSettings) -> None:
        self._ea = ea
        self._settings = settings
        self._conversations = Conversations(ea, settings.model)
        self._method: Method = "autoregressive" if settings.method == "ar" else "speculative"
        self._batch = ea.new_batch(settings.batch_size, method=self._method) if settings.batch_size > 1 else None

    def warm_up(self) -> None:
        """A short answer that is thrown away: compiled kernels and allocators settle before the clock matters.

        Raises what would make every question fail, such as a template that refuses the system message.
        """
        question = Question(question_id=0, category="math", turns=("Say hello.",))
        for _ in self._generate([{"role": "user", "content": question.turns[0]}], question, 0, 0, max_new_tokens=16):
            pass

    def answer(self, question: Question) -> Answer:
        """The row of one question; a failure becomes an error row that says where it happened."""
        return next(self.answers([question]))

    def answers(self, questions: Iterable[Question]) -> Iterator[Answer]:
        """The rows of many, `batch_size` of them decoded together; in the order in which they get done."""
        waiting, running = iter(questions), deque[_Work]()
        while True:
            running += [self._work(q) for q in islice(waiting, self._settings.batch_size - len(running))]
            if not running:
                return
            for _ in range(len(running)):
                work = running.popleft()
                try:
                    next(work)
                    running.append(work)
                except StopIteration as done:
                    yield done.value

    def _work(self, question: Question) -> _Work:
        """Answer one question, a cycle at a time."""
        choices: list[Choice] = []
        for index in range(self._settings.num_choices):
            messages: list[dict[str, str]] = []
            texts: list[str] = []
            stats: list[TurnStats] = []
            for turn, text in enumerate(question.turns):
                messages.append({"role": "user", "content": text})
                try:
                    result = yield from self._generate(messages, question, index, turn, self._settings.max_new_tokens)
                except _FAILURES as error:
                    failure = Failure(kind=type(error).__name__, message=str(error), choice=index, turn=turn)
                    return self._row(question, (), failure)
                sampling = self._settings.sampling(question, index, turn)
                assert sampling.seed is not None  # every turn has its own
                texts.append(result.text.strip())
                stats.append(TurnStats.of(result, temperature=sampling.temperature, seed=sampling.seed))
                messages.append({"role": "assistant", "content": texts[-1]})
            choices.append(Choice.of(index, texts, stats))
        return self._row(question, tuple(choices), None)

    def _generate(
        self, messages: list[dict[str, str]], question: Question, choice: int, turn: int, max_new_tokens: int
    ) -> Generator[None, None, GenerationResult]:
        ids = self._conversations.ids(messages)
        if self._settings.control:
            return controls.generate(
                self._ea,
                ids,
                self._settings.control,
                max_new_tokens=max_new_tokens,
                sampling=self._settings.sampling(question, choice, turn),
                stop=self._settings.stop,
            )
        stream = self._ea.stream(
            ids,
            max_new_tokens=max_new_tokens,
            verify=self._settings.verify,
            sampling=self._settings.sampling(question, choice, turn),
            stop=self._settings.stop,
            method=self._method,
            batch=self._batch,
        )
        for _ in stream.cycles():
            yield
        return stream.result

    def _row(self, question: Question, choices: tuple[Choice, ...], error: Failure | None) -> Answer:
        s = self._settings
        return Answer(
            question_id=question.question_id,
            answer_id=uuid.uuid5(_NAMESPACE, f"{s.model_dump_json()}/{question.question_id}").hex,
            model_id=s.model_id,
            bench_name=s.bench_name,
            category=question.category,
            method=s.method,
            choices=choices,
            error=error,
            tstamp=time.time(),
        )
