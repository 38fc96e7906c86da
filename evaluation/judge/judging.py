"""What there is to judge, and doing it: several requests at a time, each judgment written as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Protocol

from evaluation.answer_file import repair
from evaluation.answers import QuestionId
from evaluation.data.questions import Question
from evaluation.judge.client import JudgeError
from evaluation.judge.prompts import JudgePrompt, Mode, Winner, choose_prompt, rating, referenced, verdict
from evaluation.judge.records import PairJudgment, PairWinner, SingleJudgment, read_rows
from evaluation.provenance import append_row

Turns = Mapping[QuestionId, Sequence[str]]
Judgment = SingleJudgment | PairJudgment


class Asks(Protocol):
    """A judge: `evaluation.judge.client.Judge`, or something that answers like one."""

    model: str

    def ask(self, system: str, user: str) -> str: ...


@dataclass(frozen=True)
class Match:
    """One piece of work. models: one, or two for a pair. answers: each model's turns. turn: 1 or 2."""

    question: Question
    models: tuple[str, ...]
    answers: tuple[Sequence[str], ...]
    turn: int
    prompt: JudgePrompt
    reference: Sequence[str] | None

    def key(self, judge: str) -> tuple[object, ...]:
        return (self.question.question_id, *self.models, self.turn, judge, self.prompt.name)

    def user_prompt(self, order: Sequence[int] = (0,)) -> str:
        """What the judge reads. order: which model is A and which B."""
        values = {"question": self.question.turns[0]}
        values |= {f"question_{n}": text for n, text in enumerate(self.question.turns, 1)}
        values |= {f"ref_answer_{n}": text for n, text in enumerate(self.reference or (), 1)}
        for model, side in zip(order, ("_a", "_b") if len(order) == 2 else ("",), strict=True):
            values[f"answer{side}"] = self.answers[model][0]
            values |= {f"answer{side}_{n}": text for n, text in enumerate(self.answers[model], 1)}
        return self.prompt.fill(values)


def matches(
    questions: Sequence[Question],
    groups: Iterable[tuple[str, ...]],
    answers: Mapping[str, Turns],
    references: Turns,
    prompts: Sequence[JudgePrompt],
) -> Iterator[Match]:
    """Every turn of every question for every group of models (one model, or two), where all of them answered."""
    for group in groups:
        mode: Mode = "single" if len(group) == 1 else "pairwise"
        for question in questions:
            given = [answers[model].get(question.question_id) for model in group]
            told = tuple(turns for turns in given if turns is not None)
            reference = references.get(question.question_id)
            with_reference = referenced(question, reference)
            for turn in range(1, min(2, len(question.turns)) + 1):
                if len(told) == len(group) and all(len(turns) >= turn for turns in told):
                    prompt = choose_prompt(prompts, mode, turn, with_reference)
                    yield Match(question, group, told, turn, prompt, reference)


def pairs(models: Sequence[str], baseline: str | None = None) -> list[tuple[str, ...]]:
    """All pairs in order of name, or every model against the baseline."""
    if baseline:
        return [(model, baseline) for model in sorted(models) if model != baseline]
    return list(combinations(sorted(models), 2))


def judge_single(judge: Asks, match: Match) -> SingleJudgment:
    """Raises JudgeError."""
    prompt = match.user_prompt()
    judgment = judge.ask(match.prompt.system_prompt, prompt)
    return SingleJudgment(
        question_id=match.question.question_id,
        model=match.models[0],
        judge=(judge.model, match.prompt.name),
        user_prompt=prompt,
        judgment=judgment,
        score=rating(judgment),
        turn=match.turn,
        tstamp=time.time(),
    )


def judge_pair(judge: Asks, match: Match) -> PairJudgment:
    """Both orders, because judges favour a place. Raises JudgeError."""
    prompts = [match.user_prompt(order) for order in ((0, 1), (1, 0))]
    judgments = [judge.ask(match.prompt.system_prompt, prompt) for prompt in prompts]
    first: dict[Winner, PairWinner] = {"A": "model_1", "B": "model_2", "tie": "tie", "error": "error"}
    second: dict[Winner, PairWinner] = {"A": "model_2", "B": "model_1", "tie": "tie", "error": "error"}
    return PairJudgment(
        question_id=match.question.question_id,
        model_1=match.models[0],
        model_2=match.models[1],
        g1_winner=first[verdict(judgments[0])],
        g2_winner=second[verdict(judgments[1])],
        judge=(judge.model, match.prompt.name),
        g1_user_prompt=prompts[0],
        g1_judgment=judgments[0],
        g2_user_prompt=prompts[1],
        g2_judgment=judgments[1],
        turn=match.turn,
        tstamp=time.time(),
    )


def run(
    judge: Asks,
    work: Sequence[Match],
    out: Path,
    *,
    parallel: int = 1,
    on_done: Callable[[int], object] = lambda count: None,
) -> int:
    """Judge what `out` doesn't hold yet, one row per match appended to it; returns the number of new rows.

    work: all single, or all pairs. on_done: called with the number of matches that have become done, those that `out`
    held first. A match that fails leaves no row, so that the next run tries it again; the others go on.
    Raises JudgeError at the end if any failed.
    """
    in_pairs = any(len(match.models) == 2 for match in work)
    repair(out)
    held = {row.key for row in (read_rows(out, PairJudgment) if in_pairs else read_rows(out, SingleJudgment))}
    left = [match for match in work if match.key(judge.model) not in held]
    on_done(len(work) - len(left))
    failures: list[JudgeError] = []
    with ThreadPoolExecutor(parallel) as pool:
        futures: list[Future[Judgment]] = [
            pool.submit(judge_pair if in_pairs else judge_single, judge, match) for match in left
        ]
        for future in as_completed(futures):
            try:
                append_row(out, future.result().model_dump())
            except JudgeError as error:
                failures.append(error)
            on_done(1)
    if failures:
        raise JudgeError(f"{len(failures)} of {len(left)} judgments failed, run again to resume; {failures[0]}")
    return len(left)
