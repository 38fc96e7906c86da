"""From a table to the runs that fill it: which arms of which tasks, in which answer files, and how long that takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mars import DraftConfig
from evaluation.data.questions import Question, read_questions
from evaluation.models import ModelConfig, read_model_config
from evaluation.settings import RunSettings, arm_name
from evaluation.tables import Arm, Part, Row, Table
from evaluation.tasks import find_task

BASELINE = Arm(method="ar")


@dataclass(frozen=True)
class Scope:
    """What a reproduction is narrowed to, and where it works.

    models: None is all of the table. limit: questions per task. max_new_tokens: per turn; None is the task's own.
    data: a directory with TASK/question.jsonl; None is the project's own questions. out: parent of the answer files.
    batch_size: questions decoded together.
    """

    models: tuple[str, ...] | None
    limit: int | None
    max_new_tokens: int | None
    data: Path | None
    out: Path
    batch_size: int = 1


@dataclass(frozen=True)
class Run:
    """One arm of one task with one model. model: the name in `configs/models`."""

    model: str
    settings: RunSettings
    questions: Sequence[Question]
    source: str
    end: int | None
    answer_file: Path

    @property
    def asked(self) -> list[Question]:
        return list(self.questions[: self.end])

    @property
    def most_tokens(self) -> int:
        """New tokens if every turn goes to its limit."""
        turns = sum(len(question.turns) for question in self.asked)
        return turns * self.settings.num_choices * self.settings.max_new_tokens


class Planner:
    """Runs by table row. Rows of different parts and tables that ask the same share an answer file."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self._questions: dict[str, tuple[str, list[Question]]] = {}

    def run(self, part: Part, row: Row, arm: Arm) -> Run:
        """The run that decodes a row with `arm`. Raises ConfigError for an unknown model or lacking questions."""
        task = find_task(row.task)
        config = read_model_config(row.model)
        changes = part.trees[row.tree] if arm.method != "ar" else {}
        if changes:
            config = config.model_copy(update={"tree": DraftConfig(**{**config.tree.model_dump(), **changes})})
        if self.scope.batch_size > 1:  # whose forwards are too large for the second copy of the weights to pay
            config = config.model_copy(update={"cpu_pack": False})
        choices = part.num_choices.get(row.task, 1)
        limit = self.scope.max_new_tokens or task.max_new_tokens
        settings = RunSettings(
            model_id=_model_id(row, arm, config, changes, limit, choices, self.scope.batch_size),
            bench_name=task.name,
            task_version=task.version,
            model=config,
            method=arm.method,
            verify=arm.verify,
            temperature=row.temperature,
            max_new_tokens=limit,
            num_choices=choices,
            stop=task.stop,
            batch_size=self.scope.batch_size,
        )
        source, questions = self._asked(task.name, task.sample)
        file = self.scope.out / "answers" / task.name / f"{settings.model_id}.jsonl"
        ends = [end for end in (self.scope.limit, part.questions.get(row.task)) if end is not None]
        return Run(row.model, settings, questions, source, min(ends, default=None), file)

    def runs(self, table: Table) -> list[Run]:
        """All runs of a table, each once, model by model: a baseline per task, then the arms."""
        found: dict[Path, Run] = {}
        for part in table.parts:
            for row in part.rows(wanted(part, self.scope.models)):
                if row.task in part.tasks:
                    own = part.arms[row.arm]
                    for arm in (own,) if part.nodes else (BASELINE, own):
                        run = self.run(part, row, arm)
                        known = found.get(run.answer_file)
                        if known is None or len(run.asked) > len(known.asked):  # parts may ask the first so many only
                            found[run.answer_file] = run
        names = list(dict.fromkeys(run.model for run in found.values()))
        return sorted(found.values(), key=lambda run: names.index(run.model))

    def _asked(self, task: str, sample: Path) -> tuple[str, list[Question]]:
        if task not in self._questions:
            if self.scope.data:
                file = self.scope.data / task / "question.jsonl"
                self._questions[task] = (str(file), read_questions(file))
            else:
                self._questions[task] = (f"the project's own {task}", read_questions(sample))
        return self._questions[task]


def wanted(part: Part, models: tuple[str, ...] | None) -> tuple[str, ...]:
    """The models of a part that are run."""
    return tuple(model for model in part.models if models is None or model in models)


def speeds(out: Path) -> dict[tuple[str, str], float]:
    """(target, head) → tokens per second, from the answers that lie in `out` already; the slowest arm counts."""
    found: dict[tuple[str, str], float] = {}
    for path in sorted(out.glob("answers/*/*.run.json")):
        record: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
        pair = (record["settings"]["model"]["target"], record["settings"]["model"]["head"])
        for session in record["sessions"]:
            if session["summary"] and session["summary"]["tok_per_s"]:
                found[pair] = min(found.get(pair, float("inf")), session["summary"]["tok_per_s"])
    return found


def lines(runs: Sequence[Run], known: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """The plan in words: per model how much is decoded at most, and how long that takes if its speed is known."""
    for model in dict.fromkeys(run.model for run in runs):
        own = [run for run in runs if run.model == model]
        answers = sum(len(run.asked) * run.settings.num_choices for run in own)
        tokens = sum(run.most_tokens for run in own)
        time = "time unknown until its first answers"
        config = own[0].settings.model
        speed = known.get((config.target, config.head or ""))
        if speed:
            time = f"at most {tokens / speed / 60:.0f} min at {speed:.1f} tok/s, less what is answered already"
        yield f"{model}: {len(own)} runs, {answers} answers, at most {tokens} new tokens; {time}"


def _model_id(
    row: Row, arm: Arm, config: ModelConfig, changes: Mapping[str, int], limit: int, choices: int, batch_size: int
) -> str:
    """A name that tells apart everything that a table varies."""
    parts = [arm_name(row.model, arm.method, arm.verify, f"{row.temperature:g}"), f"max{limit}"]
    if changes:
        parts.append(f"tree{config.tree.total_token}.{config.tree.depth}.{config.tree.top_k}")
    if choices > 1:
        parts.append(f"n{choices}")
    if batch_size > 1:
        parts.append(f"batch{batch_size}")
    return "-".join(parts)
