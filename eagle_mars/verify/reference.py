"""The definition of verification in plain torch: no loop over nodes, no host read, the same forms as the kernels.

At most one child of a node is followed, so the path is the chain of nodes all of whose ancestors are followed: counting
and summing over ancestors replaces the walk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.sampling import Coins, History, inverse_cdf, penalise, warp
from eagle_mars.tree import DraftTree
from eagle_mars.verify.plan import MARGIN_RULES, RowPlan
from eagle_mars.verify.rules import REGISTRY, Acceptance
from eagle_mars.verify.statistics import Candidates
from eagle_mars.verify.verdict import Verdict


def verify_reference(
    tree: DraftTree,
    logits: Tensor,
    plan: RowPlan,
    coins: Coins | None = None,
    spent_regret: Tensor | None = None,
    history: History | None = None,
) -> Verdict:
    """Verdict of `plan`'s rules on `logits` [B, M, V]; see `eagle_mars.verify.verify` for the arguments."""
    logits = penalise(logits, plan.sampling, history, tree)
    uniforms = torch.ones_like(tree.draft_logprob) if coins is None else coins.accept
    candidates = Candidates(tree, logits, plan, uniforms)
    accepted = _accept(candidates)
    last, relaxed, regret, rescued = _choose_path(candidates, accepted, spent_regret)

    on_path = tree.ancestors.gather(1, last.view(-1, 1, 1).expand(-1, 1, tree.nodes)).squeeze(1)
    relaxed = relaxed & on_path
    looks = plan.rows_with(MARGIN_RULES).unsqueeze(1) if plan.rules & MARGIN_RULES else None
    none = torch.zeros_like(last)
    return Verdict(
        path=_by_depth(tree, on_path, torch.arange(tree.nodes, device=last.device).expand_as(tree.tokens), -1),
        n_accepted=on_path.sum(-1) - 1,
        next_token=_next_token(candidates, accepted, last, coins),
        relaxed=_by_depth(tree, on_path, relaxed, False),
        regret=(regret * relaxed).sum(-1),
        invalid=candidates.fault,
        low_margin=none if looks is None else (looks & on_path & candidates.low_margin).sum(-1),
        rescued=(relaxed & rescued).sum(-1),
        nonpositive_top=none if looks is None else (looks & on_path & candidates.nonpositive_top).sum(-1),
    )


def _accept(c: Candidates) -> Acceptance:
    """Each row's rule on each candidate; a batch of one rule needs no selection."""
    names = sorted(c.plan.rules)
    result = REGISTRY[names[0]](c)
    for name in names[1:]:
        rows, other = c.plan.rows_with(frozenset({name})), REGISTRY[name](c)
        result = Acceptance(
            exact=torch.where(rows.unsqueeze(1), other.exact, result.exact),
            relaxed=torch.where(rows.unsqueeze(1), other.relaxed, result.relaxed),
            removed=torch.where(rows.unsqueeze(1), other.removed, result.removed),
            next_is_top1=torch.where(rows, other.next_is_top1, result.next_is_top1),
        )
    return result


def _choose_path(
    c: Candidates, accepted: Acceptance, spent_regret: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Last node of the path [B]; then [B, M]: relaxed where followed, its regret, and whether `exact` would stop."""
    tree, plan = c.tree, c.plan
    beside_exact = c.any_sibling(accepted.exact)
    exact_first = accepted.relaxed & ~beside_exact & ~_beaten(c, accepted.relaxed)
    relaxed = torch.where(plan.longest.unsqueeze(1), accepted.relaxed, exact_first)

    regret = (c.parent_top.z1 - c.z).masked_fill(~relaxed, 0.0)
    count = (tree.ancestors & relaxed.unsqueeze(1)).sum(-1)
    total = (tree.ancestors * regret.unsqueeze(1)).sum(-1)
    budget = plan.max_regret if spent_regret is None else plan.max_regret - spent_regret
    affordable = (c.of_parent(total) < budget.unsqueeze(1)) & (total <= budget.unsqueeze(1))
    allowed = relaxed & affordable & (count <= plan.max_relaxed.unsqueeze(1))

    refused = ~(accepted.exact | allowed)
    refused[:, 0] = False
    reachable = ~(tree.ancestors & refused.unsqueeze(1)).any(-1)
    rank = tree.depth * (tree.nodes + 1) + tree.nodes - count
    rank = rank.masked_fill(~reachable, -1)
    best = rank == rank.amax(-1, keepdim=True)
    last = total.masked_fill(~best, float("inf")).argmin(-1)
    return last, relaxed, regret, ~beside_exact


def _beaten(c: Candidates, relaxed: Tensor) -> Tensor:
    """[B, M] bool: a relaxed sibling has a larger logit, or the same one and a lower id."""
    theirs, own = c.z.unsqueeze(1), c.z.unsqueeze(2)
    lower = c.tokens.unsqueeze(1) < c.tokens.unsqueeze(2)
    better = (theirs > own) | ((theirs == own) & lower)
    return (c.siblings & relaxed.unsqueeze(1) & better).any(-1)


def _next_token(c: Candidates, accepted: Acceptance, last: Tensor, coins: Coins | None) -> Tensor:
    """The target's own token after `last`: its argmax, or a draw without the children that the rule rejected there."""
    top = c.top.t1.gather(1, last.unsqueeze(1)).squeeze(1)
    if coins is None or not c.plan.sampling.draws:
        return top
    row = c.logits[torch.arange(c.tree.batch, device=last.device), last]
    warped = warp(row.unsqueeze(1), c.plan.sampling).squeeze(1)
    vocab = warped.shape[-1]
    rejected = accepted.removed & (c.tree.parents == last.unsqueeze(1))
    removed = torch.zeros(c.tree.batch, vocab + 1, dtype=torch.bool, device=last.device)
    removed.scatter_(1, c.tokens.masked_fill(~rejected, vocab), True)  # the extra column takes all that isn't rejected
    drawn = inverse_cdf(warped, coins.draw, removed[:, :vocab])
    return torch.where(accepted.next_is_top1, top, drawn)


def _by_depth(tree: DraftTree, on_path: Tensor, value: Tensor, fill: int | bool) -> Tensor:
    """[B, M] values of the path's nodes -> [B, D+1], each at its node's depth."""
    width = tree.max_depth + 1
    out = torch.full((tree.batch, width + 1), fill, dtype=value.dtype, device=value.device)
    return out.scatter_(1, tree.depth.masked_fill(~on_path, width), value)[:, :width]
