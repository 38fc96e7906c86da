"""Trees in the form in which engines keep them: links to the first child and to the next sibling."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from tests.verify.generated import random_coins, random_logits, random_tree


def drafted_case(count: int, nodes: int, vocab: int, seed: int) -> tuple[DraftTree, Tensor, Coins]:
    """Random trees on which half of the drafts are among the two best tokens of their parent's logits."""
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(count, nodes, vocab, generator)
    logits = random_logits(count, nodes, vocab, generator, tree)
    best = logits.topk(2).indices[torch.arange(count).unsqueeze(1), tree.parents.clamp(min=0)]
    choice = torch.randint(0, 4, (count, nodes, 1), generator=generator)
    tokens = torch.cat([best, tree.tokens[..., None], tree.tokens[..., None]], dim=-1).gather(-1, choice).squeeze(-1)
    return replace(tree, tokens=tokens), logits, random_coins(count, nodes, generator)


def links(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """first_child, next_sibling: [B, M] int64, -1 where there is none. Padding nodes are linked nowhere."""
    first, following = torch.full_like(tree.parents, -1), torch.full_like(tree.parents, -1)
    for row, parents in enumerate(tree.parents.tolist()):
        youngest: dict[int, int] = {}
        for node, parent in enumerate(parents):
            if parent < 0:
                continue
            if parent in youngest:
                following[row, youngest[parent]] = node
            else:
                first[row, parent] = node
            youngest[parent] = node
    return first, following
