"""One arm of an evaluation from start to end: resume, answer, fold, record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eagle_mars import EaModel
from evaluation.answer_file import AnswerWriter, answered, exclusive, fold, part
from evaluation.answers import Answer, read_answers
from evaluation.data.questions import Question
from evaluation.generate import Answerer
from evaluation.record import RunRecord
from evaluation.settings import RunSettings
from evaluation.workers import Workers


@dataclass(frozen=True)
class Job:
    """What `run_job` does.

    questions: all that the source holds. source: its name. begin, end: the slice of them that is answered.
    load: gives the pair; called only in a process that has something to answer.
    warm_up: answers that are thrown away before the first one that counts.
    """

    settings: RunSettings
    questions: Sequence[Question]
    source: str
    answer_file: Path
    workers: Workers
    load: Callable[[], EaModel]
    begin: int = 0
    end: int | None = None
    warm_up: int = 1

    @property
    def chosen(self) -> list[Question]:
        return list(self.questions[self.begin : self.end])


@dataclass
class Tally:
    """Running totals over turns. tau is tokens per cycle, the target's own included, uncut."""

    answers: int = 0
    errors: int = 0
    new_tokens: int = 0
    relaxed: int = 0
    seconds: float = 0.0
    cycles: int = field(default=0, repr=False)
    yielded: int = field(default=0, repr=False)

    def add(self, row: Answer) -> None:
        self.answers += row.error is None
        self.errors += row.error is not None
        for turn in (turn for choice in row.choices for turn in choice.stats):
            self.new_tokens += turn.new_tokens
            self.relaxed += turn.relaxed
            self.seconds += turn.seconds
            self.cycles += turn.cycles
            self.yielded += sum(turn.accepted_lengths) + turn.cycles

    @property
    def tau(self) -> float | None:
        return self.yielded / self.cycles if self.cycles else None

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "answers": self.answers,
            "errors": self.errors,
            "new_tokens": self.new_tokens,
            "relaxed": self.relaxed,
            "seconds": round(self.seconds, 3),
            "tau": self.tau and round(self.tau, 4),
            "tok_per_s": round(self.tokens_per_second, 2),
        }


def run_job(job: Job) -> Tally:
    """Answer what isn't answered yet; afterwards the answer file holds a row for every chosen question, in their order.

    Returns the totals over the chosen questions, in every process. A question that failed has an error row.
    Raises ConfigError, before anything is decoded, if the answer file belongs to other settings or is being written.
    """
    workers, first = job.workers, job.workers.first
    job.settings.require_usable_for(job.chosen)
    order = [question.question_id for question in job.questions]
    record = RunRecord(job.answer_file)
    with exclusive(job.answer_file) if first else nullcontext():
        if first:
            fold(job.answer_file, order)
            record.begin(job.settings, job.source, list(job.questions), workers.size)
        workers.wait()
        done = answered(job.answer_file)
        left = [question for question in job.chosen if question.question_id not in done]
        # Every size-th question: hard ones often lie side by side.
        _answer(job, left[workers.rank :: workers.size], already=len(job.chosen) - len(left))
        workers.wait()
        if first:
            fold(job.answer_file, order)
        workers.wait()
        tally = _total(job)
        if first:
            record.finish(tally.summary())
    return tally


def _answer(job: Job, questions: list[Question], already: int) -> None:
    if not questions:
        return
    workers = job.workers
    answerer = Answerer(job.load(), job.settings)
    for _ in range(job.warm_up):
        answerer.warm_up()
    rows = _watched(answerer.answers(questions), len(questions), already, workers)
    if not workers.writes:
        for _ in rows:
            pass
        return
    target = job.answer_file if workers.size == 1 else part(job.answer_file, workers.rank)
    with AnswerWriter(target) as writer:
        for row in rows:
            writer.append(row)


def _watched(rows: Iterable[Answer], total: int, already: int, workers: Workers) -> Iterable[Answer]:
    """A progress bar with this process's running tau and speed."""
    single = workers.size == 1
    label = "answering" if single else f"process {workers.rank} of {workers.size}"
    initial = already if single else 0
    tally = Tally()
    with tqdm(total=total + initial, initial=initial, desc=label, unit="question", disable=not workers.first) as bar:
        for row in rows:
            yield row
            tally.add(row)
            tau = f"{tally.tau:.2f}" if tally.tau else "-"
            bar.set_postfix({"tau": tau, "tok/s": f"{tally.tokens_per_second:.1f}", "errors": tally.errors})
            bar.update()


def _total(job: Job) -> Tally:
    tally = Tally()
    chosen = {question.question_id for question in job.chosen}
    for row in read_answers(job.answer_file):
        if row.question_id in chosen:
            tally.add(row)
    return tally
