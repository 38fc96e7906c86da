"""Paired statistics against textbook numbers, definitions computed another way, and their own guarantees."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom, norm

from evaluation.paired import Flips, needed_prompts


def test_counting() -> None:
    base = {1: 1.0, 2: 1.0, 3: 0.0, 4: 0.0, 5: 1.0}
    ours = {1: 1.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 0.0}
    flips = Flips.count(ours, base)
    assert flips == Flips(both=1, base_only=2, ours_only=1, neither=1)
    assert (flips.n, flips.rate) == (5, 3 / 5)
    assert flips.difference == pytest.approx(-1 / 5)
    with pytest.raises(ValueError, match="no single verdict"):
        Flips.count({1: 0.5}, {1: 1.0})


@pytest.mark.parametrize(("lost", "won"), [(1, 5), (0, 6), (3, 3), (10, 2), (0, 0)])
def test_mcnemar_is_the_sign_test_of_the_flips(lost: int, won: int) -> None:
    n = lost + won
    tail = binom.cdf(min(lost, won), n, 0.5)
    assert Flips(50, lost, won, 7).mcnemar() == pytest.approx(min(1.0, 2 * tail) if n else 1.0)


def test_mcnemar_of_an_example_done_by_hand() -> None:
    # Six flips, one against five: 2 * (1 + 6) / 64.
    assert Flips(20, 1, 5, 4).mcnemar() == pytest.approx(14 / 64)


def score_statistic(flips: Flips, difference: float) -> float:
    """Tango's statistic from its definition: the variance at the maximum of the likelihood under the hypothesis."""
    n, plus, minus = flips.n, flips.ours_only, flips.base_only
    lowest, highest = max(0.0, -difference), (1 - difference) / 2

    def surprise(base_only: float) -> float:
        cells = ((plus, base_only + difference), (minus, base_only), (n - plus - minus, 1 - 2 * base_only - difference))
        return -sum(count * math.log(max(share, 1e-300)) for count, share in cells if count)

    q = minimize_scalar(surprise, bounds=(lowest, highest), method="bounded", options={"xatol": 1e-12}).x
    return (plus - minus - n * difference) / math.sqrt(n * (2 * q + difference - difference**2))


@pytest.mark.parametrize("counts", [(60, 6, 4, 30), (150, 3, 2, 9), (10, 5, 1, 4), (80, 1, 0, 19)])
@pytest.mark.parametrize("margin", [0.02, 0.05, 0.1])
def test_noninferiority_is_tangos_score_test(counts: tuple[int, ...], margin: float) -> None:
    flips = Flips(*counts)
    assert flips.noninferiority(margin) == pytest.approx(norm.sf(score_statistic(flips, -margin)), abs=1e-5)


def test_nothing_flipped_in_a_small_set_proves_little() -> None:
    assert Flips(10, 0, 0, 10).noninferiority(0.02) > 0.2
    assert Flips(500, 0, 0, 500).noninferiority(0.02) < 0.001


def test_the_lower_bound_is_where_the_test_turns() -> None:
    flips = Flips(100, 8, 6, 50)
    bound = flips.lower_bound()
    assert bound < flips.difference
    assert flips.noninferiority(-bound) == pytest.approx(0.05, abs=1e-6)
    assert flips.noninferiority(-bound + 0.01) < 0.05 < flips.noninferiority(-bound - 0.01)
    assert Flips(0, 20, 0, 0).lower_bound() == pytest.approx(-1, abs=1e-6)


def test_the_test_errs_as_seldom_as_it_says() -> None:
    """Arms that really lose the margin are called non-inferior in about 5 % of experiments."""
    rng = np.random.default_rng(0)
    n, margin, won = 400, 0.04, 0.03
    draws = rng.multinomial(n, [0.5, won + margin, won, 0.5 - 2 * won - margin], size=4000)
    cleared = np.mean([Flips(*map(int, counts)).noninferiority(margin) < 0.05 for counts in draws])
    assert 0.035 < cleared < 0.065  # 5 %, and four standard errors of 4 000 experiments


def test_prompts_needed() -> None:
    """The published plan: 10 % of verdicts flip, one-sided 5 %, power 80 %."""
    assert needed_prompts(0.1, 0.02) == 1546
    assert needed_prompts(0.1, 0.03) == 687
    assert needed_prompts(0.1, 0.06) in range(160, 175)  # "164 prompts detect 6 points", rounded
