"""MARS on an engine's own draft tree: which children are followed by relaxation where the engine's test takes none.

The tree form of `rewrite`, and rule `mars` with `branch="exact-first"` of `eagle_mars.verify`: at a node whose own test
accepts no child, with low margin and neither of its two best tokens protected, the t1 child is followed, else the t2
child. Where the engine's test accepts a child nothing is relaxed, so a tree on which it always does is left alone.

The engine follows a child so marked because the caller makes its test pass there. `relaxed_children` is asked *after*
the engine's coins are drawn and reads them, so that no law has to be argued: path by path, the engine then decides as
`mars` does with those coins. The path ends at a node with no marked child, whose row was never touched, so the token
after it is the engine's own. Tensor operations only, no host read (on a CPU the nodes without children are looked up).
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.tree import DraftTree
from eagle_mars.verify.plan import RowPlan
from eagle_mars.verify.statistics import Candidates


def linked_tree(tokens: Tensor, first_child: Tensor, next_sibling: Tensor, levels: int) -> DraftTree:
    """A tree given by links: first_child, next_sibling [B, M] int64 node indices, -1 where there is none.

    tokens: [B, M] int64, node 0 the root. levels: the most drafts that a path may hold. A node that no link reaches
    becomes padding.
    """
    tokens = tokens.long()
    batch, nodes = tokens.shape
    own = torch.arange(nodes, device=tokens.device).expand(batch, nodes)
    spare = own.new_full((batch, 1), -1)
    parent_of_first = _scattered(own.new_full((batch, nodes), -1), first_child, own, spare)
    head = _scattered(own, next_sibling, own, spare)  # the sibling before, or the node itself where it is the first
    for _ in range((nodes - 1).bit_length()):
        head = head.gather(1, head)
    # One level too many, so that a child below the last one is seen to be there.
    return DraftTree.from_parents(tokens, parent_of_first.gather(1, head), max_depth=min(levels + 1, nodes - 1))


def relaxed_children(
    tree: DraftTree,
    logits: Tensor,
    plan: RowPlan,
    levels: int,
    accepts: Tensor | None = None,
    possible: Tensor | None = None,
) -> Tensor:
    """[B, M] bool: children that are followed by relaxation if the walk comes to their parent; at most one per parent.

    logits: [B, M, V] after penalties, before temperature. plan: compiled `mars` options; its thresholds, protected
        tokens and `max_relaxed` are read. levels: the walk's length, children below it are never followed.
    accepts: [B, M] bool, nodes at which the engine's own test accepts some child; None is greedy: a child is the t1.
    possible: [B, M] bool, children that may be followed at all (p > 0); None is all.
    """
    c = Candidates(tree, logits, plan, torch.ones_like(tree.draft_logprob))
    protected = plan.protected.gather(1, c.top.t1) | plan.protected.gather(1, c.top.t2)
    undecided = c.of_parent(c.low_margin & ~protected) & (tree.depth <= levels)
    rejected = ~c.any_sibling(c.is_top1) if accepts is None else ~c.of_parent(accepts)
    relaxed = (c.is_top1 | c.is_top2) & undecided & rejected
    if possible is not None:
        relaxed = relaxed & possible
    relaxed = relaxed & (c.is_top1 | ~c.any_sibling(relaxed & c.is_top1))
    count = (tree.ancestors & relaxed.unsqueeze(1)).sum(-1)
    return relaxed & (count <= plan.max_relaxed.unsqueeze(1))


def _scattered(into: Tensor, at: Tensor, values: Tensor, spare: Tensor) -> Tensor:
    """`into` [B, M] with `values` written where `at` isn't -1; the spare column takes the rest."""
    nodes = into.shape[1]
    return torch.cat([into, spare], dim=1).scatter(1, torch.where(at < 0, nodes, at), values)[:, :nodes]
