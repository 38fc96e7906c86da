"""Where two arms' answers first differ, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from evaluation.answers import Answer, QuestionId, TurnStats
from evaluation.gaps import Gaps
from evaluation.metrics import paired

# relaxed: the first different token, or one before it, was relaxed. tie: greedy, and the target's two best logits were
# closer than rounding. sampling: T > 0 without relaxation: other coins, or coins used otherwise (`ar`, controls).
# ended: one answer is the beginning of the other. unmeasured: greedy and not relaxed, and the gap wasn't asked for.
# unexplained: greedy, not relaxed, no tie. A defect; there must be none.
Reason = Literal["relaxed", "tie", "sampling", "ended", "unmeasured", "unexplained"]
REASONS: tuple[Reason, ...] = ("relaxed", "tie", "sampling", "ended", "unmeasured", "unexplained")
TIE = 1e-3  # nats; float32 sums in another order move a logit by less


@dataclass(frozen=True)
class Difference:
    """Where an answer first differs from the base's, and why. position: of a token, from 0. gap: nats, if measured."""

    question_id: QuestionId
    choice: int
    turn: int
    position: int
    reason: Reason
    gap: float | None = None


@dataclass(frozen=True)
class Divergence:
    """identical: answers (all turns of a choice) that equal the base's token by token. differences: of the others, in
    the first turn that differs; later turns had other prompts."""

    identical: int
    differences: list[Difference]


def diverge(ours: Sequence[Answer], base: Sequence[Answer], gaps: Gaps | None = None, tie: float = TIE) -> Divergence:
    """Where each answer first leaves the base's, over the choices that both have."""
    identical, differences = 0, []
    for mine, other in paired(ours, base):
        for choice, (a, b) in enumerate(zip(mine.choices, other.choices, strict=False)):
            both = zip(a.stats, b.stats, strict=False)
            turn = next((t for t, (x, y) in enumerate(both) if x.token_ids != y.token_ids), None)
            if turn is None:
                identical += 1
                continue
            position, reason = _why(a.stats[turn], b.stats[turn])
            gap = gaps.at(other, choice, turn, position) if gaps and reason == "unmeasured" else None
            if gap is not None:
                reason = "tie" if gap < tie else "unexplained"
            differences.append(Difference(mine.question_id, choice, turn, position, reason, gap))
    return Divergence(identical, differences)


def _why(ours: TurnStats, base: TurnStats) -> tuple[int, Reason]:
    """The first different position, and what can be said of it from the rows alone."""
    pairs = enumerate(zip(ours.token_ids, base.token_ids, strict=False))
    shorter = min(ours.new_tokens, base.new_tokens)
    position = next((i for i, (a, b) in pairs if a != b), shorter)
    if "r" in ours.provenance[: position + 1]:
        return position, "relaxed"
    if position == shorter:
        return position, "ended"
    return position, "sampling" if max(ours.temperature, base.temperature) > 0 else "unmeasured"
