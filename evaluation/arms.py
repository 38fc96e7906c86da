"""Answer files as arms of a comparison, and the questions that they answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mars.errors import ConfigError
from evaluation.answers import Answer, read_answers
from evaluation.data.questions import Question, fingerprint, read_questions
from evaluation.tasks import Task, find_task


@dataclass(frozen=True)
class Arm:
    """An answer file. name: its stem, which is FastChat's name of the model."""

    path: Path
    answers: list[Answer]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def method(self) -> str:
        return self.answers[0].method

    @property
    def batch_size(self) -> int:
        """Questions decoded together, as the run's record says; 1 without a record."""
        record = _record(self.path)
        return int(record["settings"].get("batch_size", 1)) if record and "settings" in record else 1


def read_arm(path: Path) -> Arm:
    """Raises ConfigError if the file holds no answers."""
    answers = read_answers(path)
    if not answers:
        raise ConfigError(f"{path} holds no answers yet; finish the run.")
    return Arm(path, answers)


def read_arms(paths: Sequence[Path]) -> list[Arm]:
    """Raises ConfigError if a file holds no answers, or two share the name that tells arms apart."""
    arms = [read_arm(path) for path in paths]
    if len({arm.name for arm in arms}) < len(arms):
        raise ConfigError("two answer files share a name, which is the name of their arm; rename one.")
    return arms


def asked(
    arms: Sequence[Arm], question_file: Path | None, begin: int = 0, end: int | None = None
) -> tuple[Task, list[Question]]:
    """The task and the questions of a run, `begin` and `end` as in the run.

    The run's record beside each answer file names the questions; a file given instead is checked against it.
    Raises ConfigError if the arms are of different tasks, or the questions are unknown, others, or fewer than answered.
    """
    names = {answer.bench_name for arm in arms for answer in arm.answers}
    if len(names) != 1:
        raise ConfigError(f"these answers are of different tasks ({', '.join(sorted(names))}); score one at a time.")
    task = find_task(names.pop())
    records = [(arm, _dataset(arm.path)) for arm in arms]
    questions = read_questions(question_file or _question_file(task, records[0][1]))
    for arm, dataset in records:
        if dataset and dataset["sha256"] != fingerprint(questions):
            raise ConfigError(
                f"{arm.path} answers other questions ({dataset['source']}); name them by --question-file."
            )
        strangers = {a.question_id for a in arm.answers} - {q.question_id for q in questions[begin:end]}
        if strangers:
            raise ConfigError(
                f"{arm.path} answers question {min(strangers, key=str)}, which isn't among those to score; "
                "correct --question-file, --question-begin or --question-end."
            )
    return task, questions[begin:end]


def choose_baseline(arms: Sequence[Arm], path: Path | None) -> Arm | None:
    """The arm of that file, read if it isn't among the arms; without a path the only `ar` arm, if there is just one."""
    if path:
        return next((arm for arm in arms if arm.path == path), None) or read_arm(path)
    alone = [arm for arm in arms if arm.method == "ar"]
    return alone[0] if len(alone) == 1 else None


def _record(answer_file: Path) -> dict[str, Any] | None:
    """The record beside the answers; None without one. Raises ConfigError if it is none."""
    path = answer_file.with_suffix(".run.json")
    try:
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        record["dataset"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is no record of a run ({error!r}); move it away, name --question-file.") from error
    return record


def _dataset(answer_file: Path) -> dict[str, Any] | None:
    """What the run's record says of the questions; None without a record."""
    record = _record(answer_file)
    return record["dataset"] if record else None


def _question_file(task: Task, dataset: Mapping[str, Any] | None) -> Path:
    if dataset is None:
        raise ConfigError("no record beside the answers says what was asked; name the questions by --question-file.")
    if dataset["source"] == f"the project's own {task.name}":
        return task.sample
    if not Path(dataset["source"]).is_file():
        raise ConfigError(f"the questions came from {dataset['source']}, which is no file here; name --question-file.")
    return Path(dataset["source"])
