"""Metrics against numbers computed by hand; intervals against known laws; empty cells instead of inventions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from evaluation.metrics import (
    METRICS,
    Cell,
    compare,
    interval,
    loop_rate,
    mean,
    measure,
    paired,
    ratio,
    seconds_per_solved,
)
from tests.evaluation.rows import answer, failed, turn

ROWS = [
    answer(
        1,
        [
            turn("teer", accepted=(2, 1), seconds=2.0, regret=0.5),
            turn("tt", accepted=(0,), seconds=1.0, finish="length"),
        ],
    ),
    answer(2, turn("teeeeert", accepted=(3, 3), seconds=1.0, tokens=(1, 2, 3, 4, 1, 2, 3, 4))),
    failed(3),
]


def test_each_metric_by_hand() -> None:
    cells = {name: cell.value for name, cell in measure(ROWS).items()}
    assert cells == pytest.approx(
        {
            "tau": (3 + 2 + 1 + 4 + 4) / 5,
            "tok/s": 14 / 4,
            "seconds per task": (3 + 1) / 2,
            "mean tokens": 14 / 3,
            "cap hits": 1 / 3,
            "4-gram loops": (1 / 5) / 3,  # 1234 comes twice among the five 4-grams of the last turn
            "relaxed per 1000": 1000 * 2 / 14,
            "regret per 1000": 1000 * 0.5 / 14,
            "exact prefix": (3 + 2 + 6) / 3,
            "errors": 1,
        }
    )
    assert tuple(cells) == METRICS


def test_paired_numbers_are_of_shared_questions_only() -> None:
    base = [
        answer(1, turn("tttttt", seconds=6.0)),
        answer(2, turn("tttt", seconds=4.0)),
        answer(9, turn("t", seconds=9.0)),
    ]
    ours = [
        answer(2, turn("tttttttt", seconds=2.0)),
        answer(1, turn("ttt", seconds=1.5)),
        answer(5, turn("t")),
        failed(9),
    ]
    assert [(a.question_id, b.question_id) for a, b in paired(ours, base)] == [(2, 2), (1, 1)]
    cells = compare(ours, base)
    assert cells["speed-up"].value == pytest.approx((4 + 2) / 2)  # the median of two ratios
    assert cells["length ratio"].value == pytest.approx(11 / 10)
    assert cells["time ratio"].value == pytest.approx(3.5 / 10)


def test_choices_of_a_question_are_averaged_and_never_count_as_questions() -> None:
    base = [answer(1, turn("tt", seconds=2.0))]
    ours = [answer(1, turn("tt", seconds=1.0), turn("tttt", seconds=3.0))]
    assert compare(ours, base)["length ratio"].value == pytest.approx(3 / 2)
    assert measure(ours)["seconds per task"].value == pytest.approx(2)


def test_the_target_alone_has_tau_one_and_an_answer_without_cycles_has_none() -> None:
    assert measure([answer(1, turn("ttt"), method="ar")])["tau"].value == 1
    assert measure([answer(1, turn("t"), method="mars")])["tau"] == Cell.empty(
        "no cycle: every answer ended with its first token"
    )


def test_nothing_is_invented() -> None:
    assert measure([failed(1)])["tok/s"].reason == "every row is an error"
    assert measure([failed(1)])["errors"].value == 1
    assert compare([answer(1, turn("t"))], [answer(2, turn("t"))])["speed-up"].value is None
    assert seconds_per_solved(ROWS, {}).reason == "no question was solved"
    with pytest.raises(ValueError, match="or the reason"):
        Cell(None)
    with pytest.raises(ValueError, match="or the reason"):
        Cell(1.0, reason="too")


def test_seconds_per_solved_counts_the_time_of_failures_too() -> None:
    assert seconds_per_solved(ROWS, {1: 0.0, 2: 0.5}).value == pytest.approx((3 + 1) / 0.5)


def test_loop_rate() -> None:
    assert loop_rate([1, 2, 3, 4, 5]) == 0
    assert loop_rate([7] * 12) == pytest.approx(8 / 9)
    assert loop_rate([1, 2, 3, 4] * 3) == pytest.approx(1 - 4 / 9)
    assert loop_rate([1, 2]) == 0


def test_the_interval_of_a_mean_is_the_normal_one() -> None:
    values = np.random.default_rng(3).normal(10, 2, 400)
    cell = interval([values.tolist()], mean, seed=1)
    half = norm.ppf(0.975) * values.std() / math.sqrt(len(values))
    # 2 000 resamples place a 95 % bound within about 0.05 standard errors, three times over.
    assert cell.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert cell.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_the_interval_is_the_seeds_alone() -> None:
    values = [[1.0, 5.0, 2.0, 8.0, 3.0]]
    assert interval(values, mean, seed=4) == interval(values, mean, seed=4)
    assert interval(values, mean, seed=4) != interval(values, mean, seed=5)
    assert interval([[3.0]], mean) == Cell(3.0)


def test_paired_columns_are_resampled_together() -> None:
    assert interval([[2.0, 8.0, 1.0], [1.0, 4.0, 0.5]], ratio) == Cell(2.0)  # whatever is drawn, so no spread


def test_clusters_widen_the_interval() -> None:
    """Ten questions of forty equal tokens are ten observations, not four hundred."""
    values = np.random.default_rng(0).normal(size=10)
    clustered, independent = interval([values], mean), interval([np.repeat(values, 40)], mean)
    assert clustered.high - clustered.low > 4 * (independent.high - independent.low)
