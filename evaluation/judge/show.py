"""Judgments → marks and win rates, as FastChat counts them, with intervals by question."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean

from eagle_mars.errors import ConfigError
from evaluation.answers import QuestionId
from evaluation.judge.prompts import UNPARSED
from evaluation.judge.records import PairJudgment, SingleJudgment, read_rows
from evaluation.metrics import Cell, interval, ratio

Result = dict[str, Cell]


def single_results(rows: Sequence[SingleJudgment], seed: int = 0) -> dict[str, Result]:
    """Model → first turn, second turn, mean over all judgments (FastChat's average) and unparsed judgments, which
    count for no mean. Best model first."""
    results = {}
    for model in {row.model for row in rows}:
        own = [row for row in rows if row.model == model]
        marks = [row for row in own if row.score != UNPARSED]
        results[model] = {
            "turn 1": _mark([row for row in marks if row.turn == 1], seed),
            "turn 2": _mark([row for row in marks if row.turn == 2], seed),
            "mean": _mark(marks, seed),
            "unparsed": Cell(float(len(own) - len(marks))),
        }
    return dict(sorted(results.items(), key=lambda item: (-(item[1]["mean"].value or 0), item[0])))


def pair_results(rows: Sequence[PairJudgment]) -> dict[str, Result]:
    """Model → win, loss and tie rates over all its judged pairs. A win needs the same winner in both orders; judgments
    with an unparsed game count for nothing but `unparsed`. Adjusted: a tie is half a win. Best model first."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        ours, theirs = counts[row.model_1], counts[row.model_2]
        if "error" in (row.g1_winner, row.g2_winner):
            outcome = ("unparsed", "unparsed")
        elif row.g1_winner == row.g2_winner == "model_1":
            outcome = ("win", "loss")
        elif row.g1_winner == row.g2_winner == "model_2":
            outcome = ("loss", "win")
        else:
            outcome = ("tie", "tie")
        ours[outcome[0]] += 1
        theirs[outcome[1]] += 1
    results = {model: _rates(count) for model, count in counts.items()}
    return dict(sorted(results.items(), key=lambda item: (-(item[1]["win adjusted"].value or 0), item[0])))


def question_scores(path: Path, model: str, asked: Collection[QuestionId]) -> dict[QuestionId, float]:
    """Question that was asked → mean mark of a model's turns, unparsed ones left out; without a mark it is left out.

    Raises ConfigError if the file has none.
    """
    marks: dict[QuestionId, list[float]] = defaultdict(list)
    for row in read_rows(path, SingleJudgment):
        if row.model == model and row.score != UNPARSED and row.question_id in asked:
            marks[row.question_id].append(row.score)
    if not marks:
        raise ConfigError(f"{path} holds no marks of {model}; judge it with python -m evaluation.judge single.")
    return {question: fmean(given) for question, given in marks.items()}


def _mark(rows: Sequence[SingleJudgment], seed: int) -> Cell:
    by_question: dict[QuestionId, list[float]] = defaultdict(list)
    for row in rows:
        by_question[row.question_id].append(row.score)
    if not by_question:
        return Cell.empty("no judgment with a mark")
    sums, counts = [sum(marks) for marks in by_question.values()], [float(len(m)) for m in by_question.values()]
    return interval([sums, counts], ratio, seed)


def _rates(count: Counter[str]) -> Result:
    judged = count["win"] + count["loss"] + count["tie"]
    unparsed = Cell(float(count["unparsed"]))
    if not judged:
        return dict.fromkeys(("win", "loss", "tie", "win adjusted"), Cell.empty("no parsed pair")) | {
            "unparsed": unparsed
        }
    return {
        "win": Cell(count["win"] / judged),
        "loss": Cell(count["loss"] / judged),
        "tie": Cell(count["tie"] / judged),
        "win adjusted": Cell((count["win"] + count["tie"] / 2) / judged),
        "unparsed": unparsed,
    }
