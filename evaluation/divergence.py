"""What relaxation changed: every arm paired with `exact`, question by question.

`python -m evaluation.divergence exact.jsonl mars.jsonl matched.jsonl random-swap.jsonl exact-seed1.jsonl`

The first file is the base. The others are rules, and what they have to be held against: the controls of
`evaluation.controls`, which disturb the target alone as often as the rule relaxes, and the null arm, `exact` with
another seed, which shows how much moves by chance (nothing at T = 0). Reported per arm: how many answers are identical,
where the others first differ and why; which verdicts flip, McNemar's test, non-inferiority with the margin named
beforehand; and the score on questions where the rule fired against those where it didn't.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

from eagle_mars.cli_options import one_sentence_errors
from eagle_mars.errors import ConfigError
from evaluation.arms import Arm, asked, read_arms
from evaluation.differences import REASONS, TIE, Divergence, diverge
from evaluation.gaps import Gaps
from evaluation.graders.grade import Graded, Scores, grade
from evaluation.graders.problems import with_problems
from evaluation.metrics import Cell, interval, mean, measure, turns
from evaluation.paired import Flips, needed_prompts
from evaluation.provenance import provenance, write_atomically
from evaluation.sandbox import Limits
from evaluation.table import markdown_table, plain

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    base_file: Annotated[Path, typer.Argument(help="Answers of `exact`.")],
    arm_files: Annotated[list[Path], typer.Argument(help="Answers of rules, controls and the null arm.")],
    margin: Annotated[float, typer.Option(help="Loss that would matter, in the score's unit; name it beforehand.")],
    question_file: Annotated[Path | None, typer.Option(help="Default: the questions that the run names.")] = None,
    problems: Annotated[Path | None, typer.Option(help="HumanEval.jsonl.gz, for questions without tests.")] = None,
    question_begin: Annotated[int, typer.Option(min=0, help="As in the run.")] = 0,
    question_end: Annotated[int | None, typer.Option(min=0, help="As in the run.")] = None,
    ties: Annotated[bool, typer.Option("--ties", help="Load the target and measure gaps.")] = False,
    tie: Annotated[float, typer.Option(help="Nats that rounding may bridge; raise it for half precision.")] = TIE,
    device: Annotated[str, typer.Option(help="For --ties.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Model-written programs at a time.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Directory for divergence.json and divergence.md.")] = None,
) -> None:
    """Pair answer files with those of `exact`."""
    with one_sentence_errors():
        if margin <= 0:
            raise ConfigError("--margin is a loss that would matter, so it has to be above 0; try 0.02.")
        base, *arms = read_arms([base_file, *arm_files])
        task, questions = asked([base, *arms], question_file, question_begin, question_end)
        if problems:
            questions = with_problems(questions, problems)
        gaps = Gaps.of_run(base_file, questions, device) if ties else None
        grades = [grade(task, questions, arm.answers, limits=Limits(), workers=workers) for arm in (base, *arms)]
        reports = [
            report(arm, base, ours, grades[0], margin, gaps=gaps, tie=tie, seed=seed)
            for arm, ours in zip(arms, grades[1:], strict=True)
        ]
    head = {"task": task.name, "questions": len(questions), "base": base.name, "margin": margin, "seed": seed}
    text = markdown(head, reports)
    typer.echo(text)
    if out:
        told = {**head, "arms": [r.plain() for r in reports], "provenance": provenance()}
        write_atomically(out / "divergence.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        write_atomically(out / "divergence.md", text)


@dataclass(frozen=True)
class Report:
    """One arm against the base. texts: how answers differ. scores: which verdicts do. fired: the scores where the rule
    fired, and where it didn't."""

    arm: str
    divergence: Divergence
    texts: Mapping[str, Cell]
    scores: Mapping[str, Cell]
    fired: Mapping[str, Mapping[str, Cell]]

    def plain(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "texts": plain(self.texts),
            "scores": plain(self.scores),
            "fired": {group: plain(cells) for group, cells in self.fired.items()},
            "differences": [asdict(difference) for difference in self.divergence.differences],
        }


def report(
    arm: Arm,
    base: Arm,
    ours: Graded,
    theirs: Graded,
    margin: float,
    *,
    gaps: Gaps | None = None,
    tie: float = TIE,
    seed: int = 0,
) -> Report:
    """Everything about one arm. margin: in the unit of the score."""
    divergence = diverge(arm.answers, base.answers, gaps, tie)
    metric = ours.solved or next(iter(ours.questions), None)
    if metric is None or metric not in theirs.questions:
        none = Cell.empty(next(iter(ours.reasons.values()), "no score per question"))
        return Report(arm.name, divergence, text_cells(arm, divergence, seed), {"score": none}, {})
    mine, base_scores = ours.questions[metric], theirs.questions[metric]
    fired = {answer.question_id for answer in arm.answers if any(stats.relaxed for stats in turns(answer))}
    groups = {"fired": fired, "not fired": set(base_scores) - fired}
    return Report(
        arm.name,
        divergence,
        text_cells(arm, divergence, seed),
        {**pair_cells(mine, base_scores, seed), **flip_cells(mine, base_scores, margin)},
        {
            name: pair_cells(mine, {q: s for q, s in base_scores.items() if q in group}, seed)
            for name, group in groups.items()
        },
    )


def text_cells(arm: Arm, divergence: Divergence, seed: int = 0) -> dict[str, Cell]:
    """Relaxed tokens, identical answers, median first difference, and differences by reason."""
    positions = [difference.position for difference in divergence.differences]
    counts = Counter(difference.reason for difference in divergence.differences)
    low = sum(stats.low_margin for answer in arm.answers for stats in turns(answer))
    relaxed = sum(stats.relaxed for answer in arm.answers for stats in turns(answer))
    return {
        "relaxed per 1000": measure(arm.answers, seed)["relaxed per 1000"],
        "relaxed per low margin": Cell(relaxed / low) if low else Cell.empty("no low margin was met or counted"),
        "identical": Cell(float(divergence.identical)),
        "first difference": Cell(median(positions)) if positions else Cell.empty("every answer is identical"),
        **{reason: Cell(float(counts[reason])) for reason in REASONS},
    }


def pair_cells(ours: Scores, base: Scores, seed: int = 0) -> dict[str, Cell]:
    """Both mean scores and their difference, paired by question, over the questions of `base`."""
    if not base:
        return {"n": Cell(0.0)} | dict.fromkeys(("base score", "score", "difference"), Cell.empty("no question"))
    scores = np.array([[base[question], ours[question]] for question in base]).T
    return {
        "n": Cell(float(len(base))),
        "base score": Cell(float(scores[0].mean())),
        "score": Cell(float(scores[1].mean())),
        "difference": interval([(scores[1] - scores[0]).tolist()], mean, seed),
    }


def flip_cells(ours: Scores, base: Scores, margin: float) -> dict[str, Cell]:
    """Flips either way, McNemar's p, the largest loss not excluded, p of losing `margin` or more, prompts needed."""
    names = ("lost", "won", "McNemar p", "lower bound", "p(loss >= margin)", "prompts needed")
    if any(score not in (0, 1) for score in (*ours.values(), *base.values())):
        return dict.fromkeys(names, Cell.empty("scores between 0 and 1 don't flip; see the difference's interval"))
    flips = Flips.count(ours, base)
    needed = Cell.empty("nothing flips, so there is no rate to plan with")
    if flips.rate:
        needed = Cell(float(needed_prompts(flips.rate, margin)))
    values = (flips.base_only, flips.ours_only, flips.mcnemar(), flips.lower_bound(), flips.noninferiority(margin))
    return dict(zip(names, [*(Cell(float(value)) for value in values), needed], strict=True))


def markdown(head: Mapping[str, Any], reports: Sequence[Report]) -> str:
    """Three tables: texts, scores, and scores where the rule fired; then what nothing explains."""
    fired = {f"{r.arm}, {group}": cells for r in reports for group, cells in r.fired.items()}
    parts = [
        f"{head['task']}, {head['questions']} questions, paired with {head['base']}; margin {head['margin']:g}, "
        f"one-sided 5 %; in brackets 95 % intervals, bootstrap by question, seed {head['seed']}.",
        markdown_table({r.arm: r.texts for r in reports}),
        markdown_table({r.arm: r.scores for r in reports}),
    ]
    if fired:
        parts.append(markdown_table(fired, "questions"))
    unexplained = [(r.arm, d) for r in reports for d in r.divergence.differences if d.reason == "unexplained"]
    if unexplained:
        parts.append("Greedy answers that part without relaxation or tie:\n")
        parts += [f"- {arm}: {json.dumps(asdict(difference))}" for arm, difference in unexplained]
    return "\n".join(part if part.endswith("\n") else part + "\n" for part in parts)


if __name__ == "__main__":
    app()
