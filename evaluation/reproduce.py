"""A table of the paper in one command: `python -m evaluation.reproduce --table 1 --models smollm2 --limit 4`.

Prints what it will run, runs what isn't answered yet (`evaluation.job`; kill it, repeat the command and it goes on),
scores it (`evaluation.score`), and writes Markdown, CSV, LaTeX, JSON and pictures: published, ours, the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers.utils import logging as hf_logging

from eagle_mars import EaModel
from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.errors import ConfigError, EagleMarsError
from evaluation import arms, plots
from evaluation.graders.grade import Graded, grade
from evaluation.job import Job, run_job
from evaluation.judge.show import question_scores
from evaluation.metrics import Cell
from evaluation.models import ModelConfig, load_pair
from evaluation.nodes import LoggedNode, log_questions, node_cells
from evaluation.plan import BASELINE, Planner, Run, Scope, lines, speeds, wanted
from evaluation.provenance import provenance, write_atomically
from evaluation.score import cells
from evaluation.table_pairs import paired_reports
from evaluation.table_result import FilledPart, FilledRow, FilledTable, latex, markdown, mean_cell, to_csv
from evaluation.tables import MEAN, Part, Row, Table, read_table, table_names
from evaluation.tasks import find_task
from evaluation.workers import Workers

NOT_RUN = "not run: left out by --models"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
err = Console(stderr=True)


@app.command()
def main(
    table: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join(table_names())}; 1 is short for table1.")],
    models: Annotated[
        list[str] | None, typer.Option(help="Names in configs/models; default: all of the table.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First N questions of every task.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Per turn; default: the task's.")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory with TASK/question.jsonl; default: own sets.")] = None,
    judgments: Annotated[Path | None, typer.Option(help="mt_bench marks: JUDGE_single.jsonl.")] = None,
    work: Annotated[Path, typer.Option(help="Where the answers go.")] = Path("runs") / "tables",
    out: Annotated[Path, typer.Option(help="Where the tables and pictures go.")] = Path("docs") / "results" / "tables",
    device: Annotated[str, typer.Option(help="auto (GPUs if there are any), cpu, cuda, ...")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions decoded together; their seconds overlap.")] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would run, and stop.")] = False,
) -> None:
    """Fill tables of the paper with our own runs beside the published values."""
    with one_sentence_errors():
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        if threads:
            torch.set_num_threads(threads)
        scope = Scope(tuple(models) if models else None, limit, max_new_tokens, data, work, batch_size)
        planner = Planner(scope)
        tables = [read_table(name) for name in table]
        _require_known(tables, scope.models)
        for each in tables:
            err.print(f"[bold]{each.name}[/bold]: {each.title}")
            for line in lines(planner.runs(each), speeds(work)):
                err.print("  " + line, highlight=False, soft_wrap=True)
        if plan:
            return
        workers = Workers.join(device)
        if workers.size > 1:
            raise ConfigError(
                "a table is filled by one process, which may use several GPUs; to spread its answers over processes, "
                "start evaluation.run with torchrun."
            )
        decoder = Decoder(workers)
        for each in tables:
            filler = Filler(planner, decoder, judgments)
            filled = filler.fill(each)
            if workers.rank == 0:
                _write(each, filled, filler, out / each.name)
                typer.echo(str(out / each.name / "table.md"))
        workers.leave()


def _require_known(tables: Sequence[Table], models: tuple[str, ...] | None) -> None:
    known = {model for each in tables for part in each.parts for model in part.models}
    for model in models or ():
        if model not in known:
            raise EagleMarsError(f"--models {model} is in none of these tables; they have {', '.join(sorted(known))}.")


@dataclass
class Decoder:
    """Runs jobs and keeps the last pair in memory: the arms of a model share it, whatever their trees.

    failures: model → why nothing more is tried with it. done: answer files, and to which question they are complete.
    """

    workers: Workers
    failures: dict[str, str] = field(default_factory=dict)
    done: set[tuple[Path, int | None]] = field(default_factory=set)
    _key: tuple[str, str | None] | None = None
    _pair: EaModel | None = None

    def load(self, config: ModelConfig) -> EaModel:
        """The pair with the config's tree. Raises EagleMarsError."""
        key = (config.target, config.head)
        if self._pair is None or self._key != key:
            self._pair = None  # two large pairs wouldn't fit
            self._pair, self._key = load_pair(config, **self.workers.placement(1, None)), key
        pair = self._pair
        return EaModel(pair.base_model, pair.tokenizer, pair.ea_layer, config.tree)

    def decode(self, run: Run) -> str | None:
        """Answer what isn't answered yet; None, or the reason why the run has no answers."""
        if run.model not in self.failures and (run.answer_file, run.end) not in self.done:
            try:
                self._decode(run)
                self.done.add((run.answer_file, run.end))
            except EagleMarsError as error:
                self.failures[run.model] = f"not run: {error}".rstrip(".")
                err.print(f"{run.model}: {self.failures[run.model]}", highlight=False, soft_wrap=True)
        return self.failures.get(run.model)

    def _decode(self, run: Run) -> None:
        _ = run.settings.model.head_path  # a missing head is told before anything is fetched
        err.print(f"{run.settings.bench_name}: {run.settings.model_id}", highlight=False)
        run_job(
            Job(
                settings=run.settings,
                questions=run.questions,
                source=run.source,
                answer_file=run.answer_file,
                workers=self.workers,
                load=lambda: self.load(run.settings.model),
                end=run.end,
            )
        )


@dataclass
class Filler:
    """Fills tables with cells. decoded, graded, logged: the answers, their scores or the nodes behind a task's rows."""

    planner: Planner
    decoder: Decoder
    judgments: Path | None = None
    decoded: dict[Row, arms.Arm] = field(default_factory=dict)
    graded: dict[Row, Graded] = field(default_factory=dict)
    logged: dict[Row, list[LoggedNode]] = field(default_factory=dict)
    _grades: dict[tuple[Path, int | None], Graded] = field(default_factory=dict)
    _scored: dict[tuple[Path, int | None], dict[str, Cell]] = field(default_factory=dict)

    def fill(self, table: Table) -> FilledTable:
        """Run, score, and put our cells beside the published ones."""
        self.decoded, self.graded, self.logged = {}, {}, {}
        scope = self.planner.scope
        return FilledTable(
            name=table.name,
            title=table.title,
            source=table.source,
            notes=table.notes,
            scope={
                "models": scope.models and list(scope.models),
                "limit": scope.limit,
                "max_new_tokens": scope.max_new_tokens,
                "questions": str(scope.data) if scope.data else "the project's own",
                "batch_size": scope.batch_size,
            },
            parts=tuple(self._part(part) for part in table.parts),
            provenance=provenance(),
        )

    def _part(self, part: Part) -> FilledPart:
        running = wanted(part, self.planner.scope.models)
        single: dict[Row, dict[str, Cell]] = {}
        asked: dict[Row, int] = {}
        for row in part.rows():
            if row.task == MEAN:
                tasks = [row.model_copy(update={"task": task}) for task in part.tasks]
                single[row] = {m: mean_cell([single[task][m] for task in tasks]) for m in part.metrics}
                asked[row] = sum(asked[task] for task in tasks)
            elif row.model in running:
                single[row], asked[row] = self._cells(part, row)
            else:
                reason = NOT_RUN if row.model in part.models else "our source doesn't name the model"
                single[row], asked[row] = dict.fromkeys(part.metrics, Cell.empty(reason)), 0
        rows = [
            FilledRow(
                row=row,
                questions=asked[row],
                published={metric: part.published_cell(row, metric) for metric in part.metrics},
                ours=found,
            )
            for row, found in single.items()
        ]
        return FilledPart(title=part.title, metrics=part.metrics, rows=tuple(rows))

    def _cells(self, part: Part, row: Row) -> tuple[dict[str, Cell], int]:
        """Our cells of one task's row, and how many questions were asked."""
        run = self.planner.run(part, row, part.arms[row.arm])
        if part.nodes:
            try:
                logged = log_questions(run, self.decoder.load)
            except EagleMarsError as error:
                return dict.fromkeys(part.metrics, Cell.empty(f"not run: {error}".rstrip("."))), 0
            self.logged[row] = [node for nodes in logged for node in nodes]
            return node_cells(logged), len(run.asked)
        base_run = self.planner.run(part, row, BASELINE)
        reason = self.decoder.decode(base_run) or self.decoder.decode(run)
        if reason:
            return dict.fromkeys(part.metrics, Cell.empty(reason)), 0
        arm, base = _asked_of(run), _asked_of(base_run)
        base_row = row.model_copy(update={"arm": BASELINE.method})
        self.decoded[row], self.decoded[base_row] = arm, base
        self.graded[row], self.graded[base_row] = self._graded(run, arm), self._graded(base_run, base)
        asked = run.answer_file, run.end
        if asked not in self._scored:
            self._scored[asked] = cells(arm, self.graded[row], base, seed=0)
        found = self._scored[asked]
        missing = Cell.empty(f"not a metric of {row.task}")
        return {metric: found.get(metric, missing) for metric in part.metrics}, len(run.asked)

    def _graded(self, run: Run, arm: arms.Arm) -> Graded:
        asked = run.answer_file, run.end
        if asked not in self._grades:
            self._grades[asked] = self._grade(run, arm)
        return self._grades[asked]

    def _grade(self, run: Run, arm: arms.Arm) -> Graded:
        task = find_task(run.settings.bench_name)
        if task.grader == "judge" and self.judgments:
            asked = {question.question_id for question in run.asked}
            return Graded({"judge": question_scores(self.judgments, arm.name, asked)})
        ks = sorted({1, run.settings.num_choices})
        return grade(task, run.asked, arm.answers, ks=ks)


def _asked_of(run: Run) -> arms.Arm:
    """The answers to what this run asks; an earlier one with a larger limit may have left more in the file."""
    asked = {question.question_id for question in run.asked}
    arm = arms.read_arm(run.answer_file)
    return arms.Arm(arm.path, [answer for answer in arm.answers if answer.question_id in asked])


def _write(table: Table, filled: FilledTable, filler: Filler, directory: Path) -> None:
    write_atomically(directory / "table.json", filled.model_dump_json(indent=1) + "\n")
    write_atomically(directory / "table.csv", to_csv(filled))
    write_atomically(directory / "table.tex", latex(filled))
    answers = {row: arm.answers for row, arm in filler.decoded.items()}
    pictures = plots.draw(filled, answers, filler.logged, directory)
    shown = "".join(f"\n![{picture.stem.replace('_', ' ')}]({picture.name})\n" for picture in pictures)
    pairs = paired_reports(table, filler.decoded, filler.graded)
    if pairs:
        write_atomically(directory / "paired.md", pairs)
        shown = "\nWhat relaxation changed, question by question: [paired.md](paired.md).\n" + shown
    write_atomically(directory / "table.md", markdown(filled) + shown)


if __name__ == "__main__":
    app()
