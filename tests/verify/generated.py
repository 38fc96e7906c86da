"""Random trees, logits and coins for tests: everything from one seed, logits on a coarse grid so that ties occur."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree


def random_tree(batch: int, nodes: int, vocab: int, generator: torch.Generator, padding: bool = True) -> DraftTree:
    """Breadth-first trees: parents never decrease, so siblings are contiguous. The tail of some rows is padding."""
    parents = torch.full((batch, nodes), -1)
    for row in range(batch):
        last = 0
        for node in range(1, nodes):
            last = int(torch.randint(last, node, (1,), generator=generator)) if node > 1 else 0
            last = min(last, int(parents[row, node - 1]) + 2)
            parents[row, node] = last
        if padding and row % 3 == 1 and nodes > 2:
            parents[row, int(torch.randint(1, nodes, (1,), generator=generator)) :] = -1
    tokens = torch.randint(0, vocab, (batch, nodes), generator=generator)
    logprob = -torch.rand(batch, nodes, generator=generator) * 2
    logprob[:, 0] = 0
    return DraftTree.from_parents(tokens, parents, logprob)


def random_logits(batch: int, nodes: int, vocab: int, generator: torch.Generator, tree: DraftTree) -> Tensor:
    """Multiples of 1/4 between -3 and 9, so exact in bf16; drafted tokens are often near the top; some -inf."""
    z = torch.randint(-12, 24, (batch, nodes, vocab), generator=generator).float() / 4
    parents = tree.parents.clamp(min=0)
    liked = torch.rand(batch, nodes, generator=generator) < 0.7
    rows = torch.arange(batch).unsqueeze(1).expand_as(parents)
    z[rows[liked], parents[liked], tree.tokens[liked]] += 3
    z = z.masked_fill((torch.rand(z.shape, generator=generator) < 0.1) & (z < 4), float("-inf"))
    z[..., 0] = z[..., 0].clamp(min=-3)  # never a row without a finite logit
    return z


def random_coins(batch: int, nodes: int, generator: torch.Generator) -> Coins:
    return Coins(
        torch.rand(batch, nodes, generator=generator), torch.rand(batch, generator=generator, dtype=torch.float64)
    )
