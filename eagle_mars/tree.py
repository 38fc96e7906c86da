"""The draft tree: the one structure that the drafter hands to the target and to verification."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """`M` nodes per sequence, node 0 the root: the newest token, chosen by the target but not yet fed to it.

    A parent precedes its children; siblings are contiguous, best draft probability first. A padding node
    (index > 0, parent -1) is nobody's child, so no rule can accept it.

    tokens: [B, M] int64 target ids. parents: [B, M] int64, -1 for the root. depth: [B, M] int64, root 0.
    ancestors: [B, M, M] bool, row i marks the ancestors of i, itself and the root included.
    draft_logprob: [B, M] float32, log-probability of the node given its parent under the head (root 0).
    max_depth: the deepest level that a node may have; static, so that paths have a fixed width.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    ancestors: Tensor
    draft_logprob: Tensor
    max_depth: int

    @classmethod
    def bare(cls, roots: Tensor) -> DraftTree:
        """Trees of nothing but their roots [B]: no draft."""
        return cls.from_parents(roots.unsqueeze(1), torch.full_like(roots, -1).unsqueeze(1), max_depth=0)

    @classmethod
    def from_parents(
        cls, tokens: Tensor, parents: Tensor, draft_logprob: Tensor | None = None, max_depth: int | None = None
    ) -> DraftTree:
        """Derive depth and ancestors on the device.

        tokens, parents: [B, M] int64. draft_logprob: [B, M] or None (zeros). max_depth: M - 1 when None.
        """
        batch, nodes = tokens.shape
        max_depth = nodes - 1 if max_depth is None else max_depth
        own = torch.eye(nodes, dtype=torch.bool, device=tokens.device).expand(batch, nodes, nodes)
        columns = torch.arange(nodes, device=tokens.device)
        reach = (own | (parents.unsqueeze(-1) == columns)).float()
        covered = 1
        while covered < max_depth:  # each squaring doubles the number of generations that `reach` looks back
            reach = (reach @ reach).clamp_(max=1)
            covered *= 2
        ancestors = reach > 0
        if draft_logprob is None:
            draft_logprob = torch.zeros(batch, nodes, device=tokens.device)
        return cls(tokens, parents, ancestors.sum(-1) - 1, ancestors, draft_logprob, max_depth)

    @property
    def batch(self) -> int:
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        return self.tokens.shape[1]

    def to(self, device: torch.device) -> DraftTree:
        """The same tree on `device`; itself when it is there already."""
        if self.tokens.device == device:
            return self
        fields = ("tokens", "parents", "depth", "ancestors", "draft_logprob")
        return replace(self, **{name: getattr(self, name).to(device) for name in fields})

    def paths(self) -> list[list[list[int]]]:
        """Root-to-leaf paths of node indices, per sequence, ascending leaves. For inspection: reads the device."""
        result = []
        for parents in self.parents.tolist():
            leaves = [i for i in range(len(parents)) if i not in parents and (i == 0 or parents[i] >= 0)]
            result.append([_path_to(leaf, parents) for leaf in leaves])
        return result


def _path_to(node: int, parents: list[int]) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
