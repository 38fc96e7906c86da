"""Acceptance of every tree shape from recorded greedy text; the target doesn't run again.

Growth is a prefix in both directions: a shallower tree has the levels of a deeper one with the same beam, and the best
n candidates are among the best n + 1. So one replay of the whole candidate pool answers for all depths and sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.config import DraftConfig
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.proposer import Proposer
from eagle_mars.tree import DraftTree


@dataclass(frozen=True)
class Recording:
    """A prompt and the target's greedy answer. ids: [1, L]. features: [1, L, F], None if the proposer reads none.

    start: index of the answer's first token.
    """

    ids: Tensor
    features: Tensor | None
    start: int


Needed = list[list[int]]
"""[depth][m]: nodes that a tree of that depth must have for the first m + 1 drafts to be accepted, as far as any do."""


@torch.inference_mode()
def replay(head: Proposer, recording: Recording, depth: int, top_k: int) -> list[Needed]:
    """What acceptance takes at every token of the answer that has `depth + 1` more behind it, up to `depth`."""
    pool = DraftConfig(depth=depth, top_k=top_k, total_token=top_k + depth * top_k**2 + 1)
    ids, first = recording.ids, head.first_row
    drafter, fed = Drafter(head, pool), first
    found = []
    text = ids[0].tolist()
    for root in range(recording.start, ids.shape[1] - pool.levels):
        features = recording.features
        drafter.extend(
            None if features is None else features[:, fed - first : root + 1 - first], ids[:, fed : root + 1]
        )
        fed = root + 1
        found.append(_needed(drafter.grow(ids[:, root]), text[root + 1 :], pool.levels))
    return found


def tau(positions: Sequence[Needed], depth: int, nodes: int) -> float:
    """Tokens per cycle when the text of one recording is decoded with trees of that depth and size."""
    at = cycles = tokens = 0
    while at < len(positions):
        accepted = sum(needed <= nodes for needed in positions[at][depth])
        cycles, tokens, at = cycles + 1, tokens + accepted + 1, at + accepted + 1
    return tokens / max(cycles, 1)


def _needed(tree: DraftTree, text: list[int], levels: int) -> Needed:
    scores = (tree.ancestors[0].float() @ tree.draft_logprob[0].nan_to_num(neginf=-1e9).unsqueeze(1)).squeeze(1)
    level, order = tree.depth[0], torch.arange(tree.nodes, device=tree.depth.device)
    path = torch.tensor(_walk(tree, text), device=order.device, dtype=torch.long)
    own = scores[path].unsqueeze(1)
    better = (scores > own) | ((scores == own) & (order < path.unsqueeze(1)))
    among = level.unsqueeze(0) <= torch.arange(1, levels + 1, device=order.device).unsqueeze(1)  # [depth, node]
    needed = (better.unsqueeze(0) & among.unsqueeze(1)).sum(-1) + 1
    return [row[: depth + 1] for depth, row in enumerate(needed.tolist())]


def _walk(tree: DraftTree, text: list[int]) -> list[int]:
    """The nodes below the root that spell the text, as far as any do."""
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    child: dict[tuple[int, int], int] = {}
    for node, edge in enumerate(zip(parents, tokens, strict=True)):
        child.setdefault(edge, node)
    path = [0]
    for token in text:
        found = child.get((path[-1], token))
        if found is None:
            break
        path.append(found)
    return path[1:]
