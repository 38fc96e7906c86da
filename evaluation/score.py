"""Answer files in, table of scores out: `python -m evaluation.score runs/answers/gsm8k/*.jsonl`.

One row per arm: the task's scores, then what they cost (`evaluation.metrics`), then how that compares with a baseline,
paired by question. Markdown on stdout, the same as JSON with provenance in `--out`. A cell without a number says why.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eagle_mars.cli_options import one_sentence_errors
from evaluation.arms import Arm, asked, choose_baseline, read_arms
from evaluation.graders.grade import Graded, grade
from evaluation.graders.problems import with_problems
from evaluation.judge.show import question_scores
from evaluation.metrics import Cell, compare, interval, mean, measure, seconds_per_solved
from evaluation.provenance import provenance, write_atomically
from evaluation.sandbox import Limits
from evaluation.table import markdown_table, plain

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    answer_files: Annotated[list[Path], typer.Argument(help="Answers of evaluation.run, all of one task.")],
    question_file: Annotated[Path | None, typer.Option(help="Default: the questions that the run names.")] = None,
    problems: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz, for questions without tests.")] = None,
    judgments: Annotated[Path | None, typer.Option(help="mt_bench: JUDGE_single.jsonl of evaluation.judge.")] = None,
    question_begin: Annotated[int, typer.Option(min=0, help="As in the run: what wasn't asked isn't wrong.")] = 0,
    question_end: Annotated[int | None, typer.Option(min=0, help="As in the run.")] = None,
    baseline: Annotated[Path | None, typer.Option(help="Paired with the others; default: the `ar` arm.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="k of pass@k; repeatable.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per model-written program.")] = 10.0,
    workers: Annotated[int, typer.Option(min=1, help="Programs at a time.")] = 1,
    allow_unconfined: Annotated[bool, typer.Option("--allow-unconfined", help="Run programs unguarded.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Directory for scores.json and scores.md.")] = None,
) -> None:
    """Score answer files."""
    with one_sentence_errors():
        arms = read_arms(answer_files)
        task, questions = asked(arms, question_file, question_begin, question_end)
        if problems:
            questions = with_problems(questions, problems)
        limits = Limits(seconds=timeout, allow_unconfined=allow_unconfined)
        base = choose_baseline(arms, baseline)
        rows: dict[str, dict[str, Cell]] = {}
        for arm in arms:
            if task.grader == "judge" and judgments:
                graded = Graded({"judge": question_scores(judgments, arm.name, {q.question_id for q in questions})})
            else:
                graded = grade(task, questions, arm.answers, ks=k or (1,), limits=limits, workers=workers)
            unanswered = len({q.question_id for q in questions} - {a.question_id for a in arm.answers})
            rows[arm.name] = {**cells(arm, graded, base, seed), "unanswered": Cell(float(unanswered))}
            if "judge" in graded.questions:
                rows[arm.name]["unjudged"] = Cell(float(len(questions) - len(graded.questions["judge"])))
    head = {
        "task": task.name,
        "task_version": task.version,
        "questions": len(questions),
        "baseline": base.name if base else None,
        "seed": seed,
    }
    text = (
        f"{task.name}, {len(questions)} questions; baseline {head['baseline'] or 'none'}; in brackets 95 % intervals, "
        f"bootstrap by question, seed {seed}.\n\n{markdown_table(rows)}"
    )
    typer.echo(text)
    if out:
        told_rows = [
            {"arm": arm.name, "method": arm.method, "file": str(arm.path), "cells": plain(rows[arm.name])}
            for arm in arms
        ]
        told = {**head, "rows": told_rows, "provenance": provenance()}
        write_atomically(out / "scores.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        write_atomically(out / "scores.md", text)


def cells(arm: Arm, graded: Graded, base: Arm | None, seed: int) -> dict[str, Cell]:
    """A row of the table, in the order of its columns."""
    found = {name: interval([list(scores.values())], mean, seed) for name, scores in graded.questions.items()}
    found |= {name: Cell(score.score) for name, score in graded.corpus.items()}
    found |= {name: Cell.empty(reason) for name, reason in graded.reasons.items()}
    found |= measure(arm.answers, seed)
    if graded.solved:
        found["seconds per solved"] = seconds_per_solved(arm.answers, graded.questions[graded.solved], seed)
    if base is None:
        return found | {"speed-up": Cell.empty("no baseline: give an `ar` arm, or --baseline")}
    found |= compare(arm.answers, base.answers, seed)
    if arm.batch_size != base.batch_size:
        apart = f"decoded {arm.batch_size} at a time and the baseline {base.batch_size}: their seconds don't compare"
        found |= dict.fromkeys(("speed-up", "time ratio"), Cell.empty(apart))
    return found


if __name__ == "__main__":
    app()
