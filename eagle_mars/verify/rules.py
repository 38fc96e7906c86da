"""The acceptance rules. z1 >= z2 are the two best raw logits, t1 and t2 their tokens (lowest id on ties), p the warped
distribution (temperature, top-k, top-p, min-p), q the draft head's probability, u a node's coin, H the entropy of p.
No rule accepts a token with p = 0, a repeated sibling, or anything from NaN logits.

| rule            | T = 0                | T > 0                                           | needs   | source         |
|-----------------|----------------------|-------------------------------------------------|---------|----------------|
| `exact`         | Lossless: t1         | Lossless: u < p(x) / (1 - p(earlier siblings)); | coins   | EAGLE          |
|                 |                      | next token from p without the children          |         |                |
| `mars`          | Lossy: t1, else t2   | Lossy: `exact`; only where it rejects every     | margin, | MARS paper,    |
|                 | at low margin        | child and the margin is low: t1, else t2        | coins   | on a tree      |
| `mars-paper`    | Lossy: as `mars`     | Lossy: as at T = 0, and the next token is t1    | margin  | MARS paper     |
| `mars-released` | Lossless: t1         | Lossy: where the ratio of warped logits > theta | theta,  | MARS code,     |
|                 |                      | the first sibling in {t1, t2}, else p;          | q,      | EAGLE_SPEC 5.2 |
|                 |                      | elsewhere u < p(x) / (1 - p(earlier)) / q(x)    | coins   |                |
| `typical`       | Lossless: t1         | Lossy: p(x) > min(epsilon, alpha exp(-H))       | entropy | Medusa         |
| `topk-delta`    | Lossy: x in top-K and p(x) >= p(t1) - delta, p at T = 1 if greedy      | rank    | TensorRT-LLM   |
| `prob-ratio`    | Lossy: x in top-K and p(x) >= rho p(t1), p at T = 1 if greedy          | rank    | vLLM 43184     |

Low margin is z2 > theta z1 with z1 > 0 (`logit-ratio`) or z1 - z2 < gap (`logit-gap`).

A rule says which candidates are acceptable, and how; `reference.py` applies the limits, chooses the path and draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.verify.statistics import Candidates


@dataclass(frozen=True)
class Acceptance:
    """What a rule says about each candidate: [B, M] bool.

    exact: accepted without relaxation, at most one per set of siblings. relaxed: acceptable by relaxation.
    removed: loses its mass in the draw that follows when the path ends at its parent.
    next_is_top1: [B] bool, the token after the path is t1 rather than a draw.
    """

    exact: Tensor
    relaxed: Tensor
    removed: Tensor
    next_is_top1: Tensor


Rule = Callable[[Candidates], Acceptance]


def exact(c: Candidates) -> Acceptance:
    """Point-mass test on each child in draft order: an accepted token is distributed as p (EAGLE_SPEC section 5.1)."""
    greedy = c.plan.sampling.greedy
    return Acceptance(_exact_child(c), torch.zeros_like(c.valid), c.valid, greedy)


def mars(c: Candidates) -> Acceptance:
    """Relax rejections only: where `exact` would stop at a node with low margin, follow its t1 or its t2."""
    accepted = _exact_child(c)
    greedy = c.plan.sampling.greedy
    relaxed = c.is_top2
    if c.plan.sampling.draws:
        rejected = ~c.any_sibling(accepted)
        sampled = (c.is_top1 | c.is_top2) & rejected & c.has_mass
        relaxed = torch.where(greedy.unsqueeze(1), relaxed, sampled)
    return Acceptance(accepted, relaxed & _relaxable(c), c.valid, greedy)


def mars_paper(c: Candidates) -> Acceptance:
    """Algorithm 1 as printed: no coins at any temperature, so the text is nearly greedy."""
    relaxed = c.is_top2 & _relaxable(c)
    if c.plan.sampling.draws:
        relaxed = relaxed & (c.has_mass | c.plan.sampling.greedy.unsqueeze(1))
    always = torch.ones_like(c.plan.longest)
    return Acceptance(c.is_top1, relaxed, torch.zeros_like(c.valid), always)


def mars_released(c: Candidates) -> Acceptance:
    """The released code's law (EAGLE_SPEC section 5.2), its division by q included; no guards, as there are none.

    One difference: a masked runner-up (p = 0, reachable there when z1 < 0) is never accepted.
    """
    greedy = c.plan.sampling.greedy
    if not c.plan.sampling.draws:
        return exact(c)
    follows_ratio = c.warped_ratio > c.plan.theta.unsqueeze(1)
    follows_ratio = c.of_parent(follows_ratio & c.plan.released_ratio.unsqueeze(1) & ~greedy.unsqueeze(1))
    q = c.tree.draft_logprob.double().exp().clamp(min=1e-10)
    q = torch.where(c.plan.draft_q.unsqueeze(1), q, 1.0)
    by_coin = torch.where(greedy.unsqueeze(1), c.is_top1, _first(c, _coin_below(c, c.p / q)))
    by_ratio = _first(c, (c.is_top1 | c.is_top2) & c.has_mass)
    return Acceptance(by_coin & ~follows_ratio, by_ratio & follows_ratio, c.valid & ~follows_ratio, greedy)


def typical(c: Candidates) -> Acceptance:
    """Medusa's criterion with the next token drawn from p; greedy rows accept t1 alone, as Medusa does."""
    likely = torch.zeros_like(c.valid)
    if c.plan.sampling.draws:
        threshold = torch.minimum(c.plan.epsilon.unsqueeze(1), c.plan.alpha.unsqueeze(1) * (-c.entropy).exp())
        likely = (c.p > c.of_parent(threshold)) & ~c.plan.sampling.greedy.unsqueeze(1)
    return _likely(c, likely)


def topk_delta(c: Candidates) -> Acceptance:
    """TensorRT-LLM's relaxed acceptance, on a tree and in every phase."""
    return _likely(c, c.is_ranked & c.has_mass & (c.p >= c.of_parent(c.p_top1) - c.plan.delta.unsqueeze(1)))


def prob_ratio(c: Candidates) -> Acceptance:
    """The vLLM proposals' acceptance, on a tree and in every phase."""
    return _likely(c, c.is_ranked & c.has_mass & (c.p >= c.of_parent(c.p_top1) * c.plan.rho.unsqueeze(1)))


def _likely(c: Candidates, likely: Tensor) -> Acceptance:
    """Accept t1 and, by relaxation, every likely candidate; nothing was tested by coin, so nothing loses its mass."""
    protected = c.of_parent(c.plan.protected.gather(1, c.top.t1)) | c.plan.protected.gather(1, c.tokens)
    relaxed = likely & c.valid & ~c.is_top1 & ~protected
    return Acceptance(c.is_top1, relaxed, torch.zeros_like(c.valid), c.plan.sampling.greedy)


def _exact_child(c: Candidates) -> Tensor:
    """[B, M] bool: the one child that `exact` accepts, if any."""
    if not c.plan.sampling.draws:
        return c.is_top1
    return torch.where(c.plan.sampling.greedy.unsqueeze(1), c.is_top1, _first(c, _coin_below(c, c.p)))


def _coin_below(c: Candidates, mass: Tensor) -> Tensor:
    """u < mass / (1 - mass of earlier siblings), without the division: what is left may round to nothing."""
    return c.valid & (c.coins.double() * (1 - c.mass_before).clamp(min=0) < mass)


def _first(c: Candidates, flag: Tensor) -> Tensor:
    return flag & ~(c.earlier & flag.unsqueeze(1)).any(-1)


def _relaxable(c: Candidates) -> Tensor:
    """[B, M] bool: the parent has low margin and neither of its two best tokens is protected."""
    protected = c.plan.protected.gather(1, c.top.t1) | c.plan.protected.gather(1, c.top.t2)
    return c.of_parent(c.low_margin & ~protected)


REGISTRY: dict[str, Rule] = {
    "exact": exact,
    "mars": mars,
    "mars-paper": mars_paper,
    "mars-released": mars_released,
    "typical": typical,
    "topk-delta": topk_delta,
    "prob-ratio": prob_ratio,
}
