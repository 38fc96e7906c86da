"""Acceptance of a head on greedy text, without running the target again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.config import DraftConfig
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.training.dataset import ShardDataset
from eagle_mars.training.unroll import unroll
from eagle_mars.tree import DraftTree


@dataclass(frozen=True)
class Acceptance:
    """tau: tokens per cycle of a greedy chain. conditional[s]: share of step-s drafts accepted when all before were."""

    tau: float
    conditional: list[float]
    coverage: float  # share of the text that is in the draft vocabulary
    cycles: int


@torch.inference_mode()
def chain_acceptance(head: Eagle3Head, scales: Tensor, dataset: ShardDataset, depth: int = 5) -> Acceptance:
    """Decode every sequence's greedy answer by chains of ``depth`` drafts and count.

    Drafts are compared with the recorded text, which is what verification at temperature 0 does. Feeding the recorded
    tokens while unrolling is no approximation: up to the first mismatch they *are* the drafts.
    """
    cycles = tokens = 0
    reached, accepted = [0] * depth, [0] * depth
    covered = total = 0
    vocabulary = head.to_target(torch.arange(head.config.draft_vocab_size, device=scales.device))
    for entry in dataset.entries:
        batch = dataset.batch([entry]).to(scales.device).scaled(scales)
        matches, in_range = [], []
        for step in unroll(head, batch, depth):
            drafts = head.to_target(head.logits(step.output).argmax(-1))
            matches.append((drafts == step.token) & step.valid)
            in_range.append(step.valid)
            if step.number == 0:
                known = torch.isin(step.token[step.valid], vocabulary)
                covered, total = covered + int(known.sum()), total + len(known)
        lengths = torch.stack(matches).long().cumprod(0)
        rows, valid = lengths.sum(0).tolist(), torch.stack(in_range).sum(0).tolist()
        at = 0
        # A cycle that the recorded text cuts short says nothing about its length.
        while at < len(rows) and valid[at] == depth:
            for s in range(depth):
                reached[s] += s <= rows[at]
                accepted[s] += s < rows[at]
            cycles, tokens, at = cycles + 1, tokens + rows[at] + 1, at + rows[at] + 1
    conditional = [a / max(r, 1) for a, r in zip(accepted, reached, strict=True)]
    return Acceptance(tokens / max(cycles, 1), conditional, covered / max(total, 1), cycles)


@torch.inference_mode()
def tree_tau(head: Eagle3Head, scales: Tensor, dataset: ShardDataset, config: DraftConfig) -> float:
    """Tokens per cycle when every greedy answer of ``dataset`` is decoded with draft trees of shape ``config``."""
    cycles = tokens = 0
    for entry in dataset.entries:
        batch = dataset.batch([entry]).to(scales.device).scaled(scales)
        features, following = batch.features[None], batch.next_token[None]
        text = batch.next_token.tolist()
        drafter, fed = Drafter(head, config), 0
        root = int(next(unroll(head, batch, 1)).rows[0])  # row of the answer's first token but one
        while root + config.levels < len(text):
            drafter.extend(features[:, fed : root + 1], following[:, fed : root + 1])
            fed = root + 1
            accepted = _walk(drafter.grow(following[:, root]), text[root + 1 :])
            cycles, tokens, root = cycles + 1, tokens + accepted + 1, root + accepted + 1
    return tokens / max(cycles, 1)


def _walk(tree: DraftTree, text: list[int]) -> int:
    """How many tokens of ``text`` lie on a path of ``tree`` from its root."""
    number = {
        (parent, token): i
        for i, (token, parent) in enumerate(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True))
    }
    node = length = 0
    while length < len(text) and (node, text[length]) in number:
        node, length = number[node, text[length]], length + 1
    return length
