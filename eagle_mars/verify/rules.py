"""The acceptance rules. z1 >= z2 are the two best raw logits, t1 and t2 their tokens (lowest id on ties), p the warped
distribution (temperature, top-k, top-p, min-p), q the draft head's probability, u a node's coin, H the entropy of p.
No rule accepts a token with p = 0, a repeated sibling, or anything from NaN logits.

| rule            | T = 0                | T > 0                                           | needs   | source         |
|-----------------|----------------------|-------------------------------------------------|---------|----------------|
| `exact`         | Lossless: t1         | Lossless: u < p(x) / (1 - p(earlier siblings)); | coins   | EAGLE          |
|                 |                      | next token from p without the children          |         |                |
| `mars`          | Lossy: t1, else t2   | Lossy: `exact`; only where it rejects every     | margin, | MARS paper,    |
|                 | at low margin        | child and the margin is low: t1, else t2        | coins   | on a tree      |

Low margin is z2 > theta z1 with z1 > 0 (`logit-ratio`) or z1 - z2 < gap (`logit-gap`).

A rule says which candidates are acceptable, and how; `reference.py` applies the limits, chooses the path and draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.errors import ConfigError
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
        sampled = (c.is_top1 | c.is_top2) & rejected & (c.p > 0)
        relaxed = torch.where(greedy.unsqueeze(1), relaxed, sampled)
    return Acceptance(accepted, relaxed & _relaxable(c), c.valid, greedy)


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


REGISTRY: dict[str, Rule] = {"exact": exact, "mars": mars}


def lookup(name: str) -> Rule:
    """The rule of that name; `ConfigError` for one that isn't there."""
    if name not in REGISTRY:
        raise ConfigError(f"rule={name!r} is not available; use one of {', '.join(REGISTRY)}.")
    return REGISTRY[name]
