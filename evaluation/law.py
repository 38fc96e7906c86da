"""The law of one node: which token follows it, with which probability, under a rule and the node's drafted children.

Closed forms of `eagle_mars.verify.rules` at T > 0, written for reading: they measure how far a rule is from the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.config import VerifyConfig


@dataclass(frozen=True)
class Node:
    """logits: [V] raw. p: [V] float64, the warped distribution. w: [V] warped logits. children: target ids in draft
    order. q: draft probability of each child."""

    logits: Tensor
    p: Tensor
    w: Tensor
    children: list[int]
    q: list[float]


def law(node: Node, config: VerifyConfig, protected: frozenset[int] = frozenset()) -> Tensor:
    """[V] float64: the distribution of the next token. Rules: exact, mars, mars-paper, mars-released."""
    if config.rule == "mars-released":
        return _released(node, config)
    (z1, z2), (t1, t2) = _best_two(node.logits)
    low = z1 - z2 < (config.gap or 0) if config.margin == "logit-gap" else z1 > 0 and z2 > (config.theta or 1) * z1
    low = low and config.relaxes and not protected & {t1, t2}
    if config.rule == "mars-paper":
        return _point(node, t2 if low and t1 not in node.children and t2 in node.children else t1)
    result = node.p.clone()
    followed = next((t for t in (t1, t2) if t in node.children and node.p[t] > 0), None)
    if config.rule == "mars" and low and followed is not None:
        # What `exact` leaves to the tokens that were not drafted goes to the child that relaxation follows.
        drafted = torch.zeros_like(result, dtype=torch.bool)
        drafted[node.children] = True
        rest = result[~drafted].sum()
        result[~drafted] = 0
        result[followed] += rest
    return result


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the L1 distance of two distributions."""
    return float((first - second).abs().sum() / 2)


def _released(node: Node, config: VerifyConfig) -> Tensor:
    (w1, w2), pair = _best_two(node.w)
    if config.released_ratio and w2 / (w1 + 1e-10) > (config.theta or 1):
        accepted = next((child for child in node.children if child in pair), None)
        return node.p.clone() if accepted is None else _point(node, accepted)
    result, left, p = torch.zeros_like(node.p), 1.0, node.p.clone()
    for child, q in zip(node.children, node.q, strict=True):
        accept = min(1.0, float(p[child]) / (max(q, 1e-10) if config.released_q == "draft" else 1.0))
        result[child] += left * accept
        left *= 1 - accept
        if left <= 0:
            return result
        p[child] = 0
        p = p / p.sum()
    return result + left * p


def _best_two(logits: Tensor) -> tuple[list[float], list[int]]:
    values, ids = logits.double().topk(2)
    return values.tolist(), ids.tolist()


def _point(node: Node, token: int) -> Tensor:
    result = torch.zeros_like(node.p)
    result[token] = 1
    return result
