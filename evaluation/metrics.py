"""What a run costs and gives, from its answer rows: numbers with intervals, or an empty cell that says why.

Intervals are 95 % percentile intervals of a bootstrap that resamples questions, with all their choices and turns,
because tokens of one answer don't vary independently. Paired numbers resample the pairs. Same seed, same interval.

Counting (DESIGN section 3): tokens from ids, cut at the first stop token and at the limit; tau = Σ(accepted + 1) /
cycles, uncut; seconds are wall time with prefill. Error rows have no tokens and no time: they lower scores, never
speeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.stats import bootstrap

from evaluation.answers import Answer, QuestionId, TurnStats

Array = NDArray[np.float64]
Statistic = Callable[..., Array]

METRICS = (
    "tau",
    "tok/s",
    "seconds per task",
    "mean tokens",
    "cap hits",
    "4-gram loops",
    "relaxed per 1000",
    "regret per 1000",
    "exact prefix",
    "errors",
)
PAIRED = ("speed-up", "length ratio", "time ratio")
_RESAMPLES = 2000
_LEVEL = 0.95


@dataclass(frozen=True)
class Cell:
    """A number, perhaps with its interval; or none, and then `reason` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.reason):
            raise ValueError("a cell holds a number or the reason why there is none")

    @classmethod
    def empty(cls, reason: str) -> Cell:
        return cls(None, reason=reason)


def interval(columns: Sequence[Sequence[float]], statistic: Statistic, seed: int = 0) -> Cell:
    """`statistic` of the columns, whose n-th entries belong to the n-th question, with its bootstrap interval.

    statistic: arrays [..., questions] and `axis` → [...]. The interval is left out for a single question, where some
    resamples have no value (a ratio whose denominator is 0 for many questions), and where all have the same: no
    spread was seen, which is not to say that there is none.
    """
    data = [np.asarray(column, dtype=float) for column in columns]
    value = float(statistic(*data, axis=-1))
    if len(data[0]) < 2:
        return Cell(value)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = bootstrap(
            data,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=_RESAMPLES,
            confidence_level=_LEVEL,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
    low, high = float(found.low), float(found.high)
    told = np.isfinite([low, high]).all() and not math.isclose(low, high, rel_tol=1e-12)
    return Cell(value, low, high) if told else Cell(value)


def mean(values: Array, axis: int = -1) -> Array:
    return values.mean(axis=axis)


def ratio(numerator: Array, denominator: Array, axis: int = -1) -> Array:
    """Ratio of sums, which weighs a question by its size."""
    return numerator.sum(axis=axis) / denominator.sum(axis=axis)


def median_ratio(numerator: Array, denominator: Array, axis: int = -1) -> Array:
    """Median of the questions' ratios."""
    return np.median(numerator / denominator, axis=axis)


def loop_rate(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same answer."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def turns(answer: Answer) -> list[TurnStats]:
    """All turns of all choices; none of an error row."""
    return [stats for choice in answer.choices for stats in choice.stats]


def measure(answers: Sequence[Answer], seed: int = 0) -> dict[str, Cell]:
    """The metrics of one arm, all of whose rows were decoded by one method.

    Keys, METRICS: tau; tok/s; seconds per task (a question's mean over its choices); mean tokens of a turn; cap hits
    (share of turns that ended at the limit); 4-gram loops (mean over turns); relaxed tokens and regret (nats) per 1000
    tokens; exact prefix (mean tokens of a turn before the first relaxed one); errors (rows).
    """
    good = [answer for answer in answers if answer.error is None]
    errors = Cell(float(len(answers) - len(good)))
    if not good:
        return dict.fromkeys(METRICS, Cell.empty("every row is an error")) | {"errors": errors}
    columns = {name: [part(turns(answer)) for answer in good] for name, part in _SUMS.items()}

    def share(above: str, below: str, scale: float = 1) -> Cell:
        return interval([[scale * x for x in columns[above]], columns[below]], ratio, seed)

    return {
        "tau": share("cycle tokens", "cycles") if any(columns["cycles"]) else _tau_without_cycles(good),
        "tok/s": share("tokens", "seconds"),
        "seconds per task": interval([[_seconds(answer) for answer in good]], mean, seed),
        "mean tokens": share("tokens", "turns"),
        "cap hits": share("capped", "turns"),
        "4-gram loops": share("loops", "turns"),
        "relaxed per 1000": share("relaxed", "tokens", 1000),
        "regret per 1000": share("regret", "tokens", 1000),
        "exact prefix": share("prefix", "turns"),
        "errors": errors,
    }


def compare(ours: Sequence[Answer], base: Sequence[Answer], seed: int = 0) -> dict[str, Cell]:
    """Paired by question, over those that both arms answered.

    Keys, PAIRED: speed-up (median over questions of the ratio of tokens per second), length ratio (of all tokens), time
    ratio (of all seconds: what a user waits, longer answers included).
    """
    pairs = paired(ours, base)
    if not pairs:
        return dict.fromkeys(PAIRED, Cell.empty("the two arms share no answered question"))
    tokens = [[_tokens(answer) for answer in side] for side in zip(*pairs, strict=True)]
    seconds = [[_seconds(answer) for answer in side] for side in zip(*pairs, strict=True)]
    speeds = [np.divide(tokens[side], seconds[side]).tolist() for side in (0, 1)]
    return {
        "speed-up": interval(speeds, median_ratio, seed),
        "length ratio": interval(tokens, ratio, seed),
        "time ratio": interval(seconds, ratio, seed),
    }


def seconds_per_solved(answers: Sequence[Answer], solved: Mapping[QuestionId, float], seed: int = 0) -> Cell:
    """All seconds over all solved questions. solved: share of a question's choices that were right; absent is none."""
    good = [answer for answer in answers if answer.error is None]
    score = [solved.get(answer.question_id, 0.0) for answer in good]
    if not sum(score):
        return Cell.empty("no question was solved")
    return interval([[_seconds(answer) for answer in good], score], ratio, seed)


def paired(ours: Sequence[Answer], base: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Rows of the same question, in our order, where neither is an error."""
    others = {answer.question_id: answer for answer in base if answer.error is None}
    return [(a, others[a.question_id]) for a in ours if a.error is None and a.question_id in others]


_SUMS: dict[str, Callable[[list[TurnStats]], float]] = {
    "turns": len,
    "tokens": lambda stats: sum(s.new_tokens for s in stats),
    "seconds": lambda stats: sum(s.seconds for s in stats),
    "cycles": lambda stats: sum(s.cycles for s in stats),
    "cycle tokens": lambda stats: sum(n + 1 for s in stats for n in s.accepted_lengths),
    "capped": lambda stats: sum(s.finish_reason == "length" for s in stats),
    "loops": lambda stats: sum(loop_rate(s.token_ids) for s in stats),
    "relaxed": lambda stats: sum(s.relaxed for s in stats),
    "regret": lambda stats: sum(s.regret for s in stats),
    "prefix": lambda stats: sum(s.exact_prefix for s in stats),
}


def _tau_without_cycles(answers: Sequence[Answer]) -> Cell:
    if all(answer.method in ("ar", "random-swap", "matched") for answer in answers):
        return Cell(1.0)  # the target alone gives one token per forward
    return Cell.empty("no cycle: every answer ended with its first token")


def _tokens(answer: Answer) -> float:
    return fmean(sum(stats.new_tokens for stats in choice.stats) for choice in answer.choices)


def _seconds(answer: Answer) -> float:
    return fmean(sum(stats.seconds for stats in choice.stats) for choice in answer.choices)
