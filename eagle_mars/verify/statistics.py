"""What the rules look at: statistics of each node's logits, and each node seen as a child of its parent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eagle_mars.sampling import cutoff, temper
from eagle_mars.tree import DraftTree
from eagle_mars.verify.plan import RowPlan
from eagle_mars.verify.verdict import Fault

_BLOCK = 128
_MINUS_INF = float("-inf")


@dataclass(frozen=True)
class Top2:
    """The two largest logits of each row, lowest id first on ties. z1, z2: [B, M] float64; t1, t2: [B, M] int64.

    A vocabulary of one token has z2 = -inf and t2 = t1.
    """

    z1: Tensor
    t1: Tensor
    z2: Tensor
    t2: Tensor


def top2(logits: Tensor) -> Top2:
    """[B, M, V] -> `Top2`. NaN counts as largest, so that it is seen in z1."""
    if logits.shape[-1] > 2 * _BLOCK:
        values, ids = _best_blocks(logits)
    else:
        values = logits.double()
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    at = values.argmax(-1, keepdim=True)
    t1, z1 = ids.gather(-1, at), values.gather(-1, at)
    values = values.scatter(-1, at, _MINUS_INF)
    at = values.argmax(-1, keepdim=True)
    z2 = values.gather(-1, at)
    t2 = torch.where(z2 == _MINUS_INF, t1, ids.gather(-1, at))
    return Top2(z1.squeeze(-1), t1.squeeze(-1), z2.squeeze(-1), t2.squeeze(-1))


def _best_blocks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Values (float64) and ids, [B, M, 2 * _BLOCK], of the two blocks of the vocabulary that hold the two best logits.

    A maximum over blocks runs at the speed of memory, while arg-max and top-k over a whole vocabulary cost ten times as
    much on a CPU. The blocks come in ascending order, so that ties keep the lowest id.
    """
    vocab = logits.shape[-1]
    whole = vocab - vocab % _BLOCK
    maxima = [logits[..., :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)]
    if whole < vocab:
        maxima.append(logits[..., whole:].amax(-1, keepdim=True))
    blocks = torch.cat(maxima, dim=-1)
    first = blocks.argmax(-1, keepdim=True)
    second = blocks.scatter(-1, first, _MINUS_INF).argmax(-1, keepdim=True)
    pair = torch.cat([first, second], dim=-1).sort(-1).values
    ids = (pair.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(-2)
    values = logits.gather(-1, ids.clamp(max=vocab - 1)).double()
    # Block 0 comes twice if it alone has finite logits, and the last block may be short: neither a repetition nor the
    # overhang may win a place.
    twice = torch.arange(2 * _BLOCK, device=logits.device) >= _BLOCK
    return values.masked_fill((ids >= vocab) | (twice & (first == second)), _MINUS_INF), ids


class Candidates:
    """Every node as a candidate of its parent: tensors [B, M], each computed when a rule first asks for it.

    Node m's entries speak of m's token under the logits of m's *parent*; the root and padding nodes are not `valid`.

    logits: [B, M, V] after penalties, any float dtype. coins: [B, M] in [0, 1), read only for rows that draw.
    """

    def __init__(self, tree: DraftTree, logits: Tensor, plan: RowPlan, coins: Tensor) -> None:
        self.tree = tree
        self.logits = logits
        self.plan = plan
        self.coins = coins

    @cached_property
    def tokens(self) -> Tensor:
        return self.tree.tokens.clamp(0, self.logits.shape[-1] - 1)  # padding may hold any number

    @cached_property
    def siblings(self) -> Tensor:
        """[B, M, M] bool: j is a child of i's parent (i itself included)."""
        parents = self.tree.parents
        return (parents.unsqueeze(2) == parents.unsqueeze(1)) & (parents >= 0).unsqueeze(1)

    @cached_property
    def earlier(self) -> Tensor:
        """[B, M, M] bool: j is a sibling of i that precedes it, so better in the draft's eyes."""
        nodes = self.tree.nodes
        order = torch.ones(nodes, nodes, dtype=torch.bool, device=self.tree.parents.device).tril(-1)
        return self.siblings & order

    @cached_property
    def valid(self) -> Tensor:
        """A child, and not a repetition of an earlier sibling's token: a repetition has no mass left."""
        repeats = self.earlier & (self.tokens.unsqueeze(2) == self.tokens.unsqueeze(1))
        return (self.tree.parents >= 0) & ~repeats.any(-1)

    @cached_property
    def top(self) -> Top2:
        """The two best tokens of each node's own logits."""
        return top2(self.logits)

    @cached_property
    def parent_top(self) -> Top2:
        top = self.top
        return Top2(*(self.of_parent(x) for x in (top.z1, top.t1, top.z2, top.t2)))

    @cached_property
    def z(self) -> Tensor:
        """float64: the token's raw logit."""
        rows = torch.arange(self.tree.batch, device=self.logits.device).unsqueeze(1)
        return self.logits[rows, self.tree.parents.clamp(min=0), self.tokens].double()

    @cached_property
    def is_top1(self) -> Tensor:
        return self.valid & (self.tokens == self.parent_top.t1)

    @cached_property
    def is_top2(self) -> Tensor:
        return self.valid & (self.tokens == self.parent_top.t2) & ~self.is_top1

    @cached_property
    def low_margin(self) -> Tensor:
        """[B, M] of the node itself, not of its parent: its two best tokens are close under the row's margin."""
        top, plan = self.top, self.plan
        ratio = (top.z1 > 0) & (top.z2 > plan.theta.unsqueeze(1) * top.z1)
        gap = top.z1 - top.z2 < plan.gap.unsqueeze(1)
        return torch.where(plan.by_gap.unsqueeze(1), gap, ratio)

    @cached_property
    def nonpositive_top(self) -> Tensor:
        """[B, M] of the node itself: z1 <= 0, where the ratio says nothing and therefore never relaxes."""
        return (self.top.z1 <= 0) & ~self.plan.by_gap.unsqueeze(1)

    @cached_property
    def asked(self) -> Tensor | None:
        """Nodes whose distribution matters, R of them: those with a child somewhere in the batch; None is all nodes.

        A device can't tell the host without a wait, but on a CPU it costs nothing, and most nodes of a tree are leaves.
        """
        parents = self.tree.parents
        return parents[parents >= 0].unique() if parents.device.type == "cpu" else None

    @cached_property
    def tempered(self) -> Tensor:
        """[B, R, V] of the nodes in `asked`."""
        return temper(self.logits if self.asked is None else self.logits[:, self.asked], self.plan.sampling)

    @cached_property
    def asked_cut(self) -> Tensor | None:
        """[B, R, 1] lowest tempered logit that the warpers keep, or None when no row truncates."""
        return cutoff(self.tempered, self.plan.sampling) if self.plan.sampling.truncates else None

    @cached_property
    def warped(self) -> Tensor:
        """[B, R, V] of the nodes in `asked`."""
        if self.asked_cut is None:
            return self.tempered
        return self.tempered.masked_fill(self.tempered < self.asked_cut, _MINUS_INF)

    @cached_property
    def cut(self) -> Tensor | None:
        """`asked_cut` of the node itself."""
        return None if self.asked_cut is None else self.spread(self.asked_cut.squeeze(-1))

    @cached_property
    def log_normaliser(self) -> Tensor:
        """float64 of the node itself: log-sum-exp of its warped logits."""
        return self.spread(self.warped.logsumexp(-1).double())

    @cached_property
    def p(self) -> Tensor:
        """float64: the token's probability under the warped distribution; greedy rows: at T = 1."""
        w = self.warped_logit(self.z)
        return (w - self.of_parent(self.log_normaliser)).exp()

    def warped_logit(self, z: Tensor) -> Tensor:
        """[B, M] raw logits of tokens under each node's parent -> float64 warped logits, -inf where removed."""
        w = temper(z.unsqueeze(-1), self.plan.sampling).squeeze(-1)
        if self.cut is not None:
            w = w.masked_fill(w < self.of_parent(self.cut), _MINUS_INF)
        return w.double()

    @cached_property
    def has_mass(self) -> Tensor:
        """Not removed by the warpers, which is p > 0 without the log-sum-exp."""
        return self.warped_logit(self.z) > _MINUS_INF

    @cached_property
    def p_top1(self) -> Tensor:
        """float64 of the node itself: p(t1), greedy rows at T = 1. The warpers never remove t1."""
        return (temper(self.top.z1.unsqueeze(-1), self.plan.sampling).squeeze(-1) - self.log_normaliser).exp()

    @cached_property
    def entropy(self) -> Tensor:
        """float64 of the node itself: entropy of its warped distribution in nats."""
        return self.spread(torch.special.entr(self.warped.softmax(-1)).sum(-1).double())

    @cached_property
    def is_ranked(self) -> Tensor:
        """The token is among the `rank` best of its parent's logits; ties at the last place count."""
        best = self.logits.topk(min(self.plan.max_rank, self.logits.shape[-1]), dim=-1).values
        last = (self.plan.rank.clamp(max=best.shape[-1]) - 1).view(-1, 1, 1).expand(-1, best.shape[1], 1)
        return self.z >= self.of_parent(best.gather(-1, last).squeeze(-1).double())

    @cached_property
    def warped_ratio(self) -> Tensor:
        """float64 of the node itself: the released code's ratio w2 / (w1 + 1e-10) of warped logits; 0 if V = 1."""
        if self.logits.shape[-1] == 1:
            return torch.zeros_like(self.top.z1)
        pair = temper(torch.stack([self.top.z1, self.top.z2], dim=-1), self.plan.sampling)
        if self.cut is not None:
            pair = pair.masked_fill(pair < self.cut.unsqueeze(-1), _MINUS_INF)
        w1, w2 = pair.double().unbind(-1)
        return w2 / (w1 + 1e-10)

    @cached_property
    def mass_before(self) -> Tensor:
        """float64: the probability of all earlier siblings, which were rejected before this one is tried."""
        p = self.p.masked_fill(~self.valid, 0.0)
        return (self.earlier * p.unsqueeze(1)).sum(-1)

    @cached_property
    def fault(self) -> Tensor:
        """[B] int64 `Fault` over all real nodes; padding nodes may hold anything."""
        real = self.tree.parents >= 0
        real[:, 0] = True
        z1 = self.top.z1
        nan = (real & z1.isnan()).any(-1)
        infinite = (real & z1.isinf()).any(-1)
        return torch.where(nan, int(Fault.NAN), torch.where(infinite, int(Fault.NO_FINITE_TOP), int(Fault.NONE)))

    def spread(self, values: Tensor) -> Tensor:
        """[B, R] of the nodes in `asked` -> [B, M], 0 where nobody asks."""
        if self.asked is None:
            return values
        return values.new_zeros(self.tree.batch, self.tree.nodes).index_copy(1, self.asked, values)

    def of_parent(self, per_node: Tensor) -> Tensor:
        """[B, M] of each node -> [B, M] of each node's parent (the root's own for root and padding)."""
        return per_node.gather(1, self.tree.parents.clamp(min=0))

    def any_sibling(self, flag: Tensor) -> Tensor:
        """[B, M] -> [B, M]: some child of this node's parent has the flag."""
        return (self.siblings & flag.unsqueeze(1)).any(-1)
