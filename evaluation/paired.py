"""Whether two arms differ in which questions they solve: McNemar's test, non-inferiority, and the prompts it takes.

Not finding a difference proves nothing on a small set. What shows that relaxation costs little is non-inferiority: the
loss is smaller than a margin that was named beforehand, at one-sided 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import binomtest, norm

from evaluation.answers import QuestionId

ALPHA = 0.05
POWER = 0.8


@dataclass(frozen=True)
class Flips:
    """Questions by who solved them: both arms, the base alone, ours alone, neither."""

    both: int
    base_only: int
    ours_only: int
    neither: int

    @classmethod
    def count(cls, ours: Mapping[QuestionId, float], base: Mapping[QuestionId, float]) -> Flips:
        """From verdicts 0 or 1 per question, over the questions of `base`.

        Raises ValueError for a share between them: a question with several samples is no single verdict.
        """
        pairs = [(base[question], ours[question]) for question in base]
        if any(score not in (0, 1) for pair in pairs for score in pair):
            raise ValueError("a question was solved in some of its samples only, so it has no single verdict")
        return cls(*(pairs.count(verdicts) for verdicts in ((1, 1), (1, 0), (0, 1), (0, 0))))

    @property
    def n(self) -> int:
        return self.both + self.base_only + self.ours_only + self.neither

    @property
    def difference(self) -> float:
        """Our share of solved questions minus the base's."""
        return (self.ours_only - self.base_only) / self.n

    @property
    def rate(self) -> float:
        """Share of questions whose verdict flips."""
        return (self.ours_only + self.base_only) / self.n

    def mcnemar(self) -> float:
        """Two-sided exact p-value of "flips go either way equally often"; 1 without flips."""
        flips = self.base_only + self.ours_only
        return float(binomtest(self.ours_only, flips, 0.5).pvalue) if flips else 1.0

    def noninferiority(self, margin: float) -> float:
        """One-sided p-value of "we lose `margin` or more of all questions": small means that the loss is below it.

        Tango's score test (Statistics in Medicine 17, 1998), which stays valid where hardly any verdict flips.
        """
        return float(norm.sf(self._score(-margin)))

    def lower_bound(self) -> float:
        """One-sided 95 % confidence bound of the difference: the largest loss that can't be excluded, as a negative."""
        if self._score(-1 + 1e-9) <= norm.ppf(1 - ALPHA):
            return -1.0
        return float(
            brentq(lambda difference: self._score(difference) - norm.ppf(1 - ALPHA), -1 + 1e-9, self.difference)
        )

    def _score(self, difference: float) -> float:
        """Tango's statistic of the hypothesis that the true difference is `difference`; standard normal under it."""
        n, plus, minus = self.n, self.ours_only, self.base_only
        b = -plus - minus + (2 * n - plus + minus) * difference
        c = -minus * difference * (1 - difference)
        restricted = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (
            4 * n
        )  # of the base-only share, given the difference
        variance = n * (2 * restricted + difference * (1 - difference))
        excess = plus - minus - n * difference
        if variance <= 0:
            return math.copysign(math.inf, excess) if excess else 0.0
        return excess / math.sqrt(variance)


def needed_prompts(flip_rate: float, margin: float) -> int:
    """Prompts that a non-inferiority test with this margin needs when there is no loss: one-sided 5 %, power 80 %."""
    return math.ceil(flip_rate * ((norm.ppf(1 - ALPHA) + norm.ppf(POWER)) / margin) ** 2)
