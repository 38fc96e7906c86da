"""A drafter whose cycle, accepted rows and tree, is one compiled function."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle_mars.compiled import Compiled, Graphs, Inductor, read_rows
from eagle_mars.config import DraftConfig
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.grow import grow
from eagle_mars.draft.head import Head
from eagle_mars.tree import DraftTree


class CompiledDrafter(Drafter):
    """Drafts as `Drafter` does, for one sequence; `compiled` is that head's and tree's `compiled_cycle`.

    A cycle brings 1 to levels + 1 accepted rows. Compiled code takes as many always: those behind the real ones are
    written where draft rows go, behind the mask, and overwritten.
    """

    def __init__(self, head: Head, config: DraftConfig, compiled: Compiled) -> None:
        super().__init__(head, config)
        self._compiled = compiled

    @torch.no_grad()
    def draft(self, features: Tensor | None, next_tokens: Tensor) -> DraftTree:
        most, new = self.config.levels + 1, next_tokens.shape[1]
        if features is None or self.rows == 0 or new > most:  # the prompt
            return super().draft(features, next_tokens)
        padding = most - new
        features = F.pad(features.to(device=self._device, dtype=self._dtype), (0, 0, 0, padding))
        tokens = F.pad(next_tokens.to(self._device), (0, padding))
        self._reserve(self.rows + most)
        read = read_rows(self.rows + most + self.config.depth * self.config.top_k, self._capacity, self._device)
        numbers = torch.arange(read, device=self._device)
        counts = torch.tensor([self.rows, new], device=self._device)
        state = [tensor for pair in self.cache for tensor in pair]
        drafted, parents, depth, ancestors, logprob = self._compiled((features, tokens, counts, numbers), state)
        self.rows += new
        return DraftTree(drafted, parents, depth, ancestors, logprob, self.config.levels)

    def _reserve(self, rows: int) -> None:
        before = self.cache
        super()._reserve(rows)
        if self.cache is not before:  # what lies behind the rows is read, masked: it must be finite, 0 * NaN is NaN
            for tensor in (tensor for pair in self.cache for tensor in pair):
                tensor[:, :, self.rows :] = 0


def compiled_cycle(head: Head, config: DraftConfig) -> Compiled:
    """The function that drafters of `head` with the tree `config` share."""
    cycle = partial(_cycle, head, config)
    on_gpu = next(head.parameters()).is_cuda
    return Compiled(cycle, Graphs(cycle) if on_gpu else Inductor(cycle, growing={3: 0}), "drafting")


def _cycle(
    head: Head, config: DraftConfig, features: Tensor, tokens: Tensor, counts: Tensor, numbers: Tensor, *state: Tensor
) -> tuple[Tensor, ...]:
    """features [1, T, F], tokens [1, T], counts [2] (rows in the cache, real ones of the T), numbers: 0 … rows to read.

    state: keys and values of each layer in turn. Returns the tensors of the tree.
    """
    cache = list(zip(state[::2], state[1::2], strict=True))
    rows, new = counts[:1], counts[1:]
    positions = rows.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device)
    mask = (numbers <= positions.unsqueeze(-1)).unsqueeze(1)
    output = head(head.fuse(features), tokens, positions, mask, cache, rows)
    newest = (new - 1).unsqueeze(1)
    output = output.gather(1, newest.unsqueeze(-1).expand(-1, -1, output.shape[-1]))
    root = tokens.gather(1, newest).squeeze(1)
    tree = grow(head, cache, rows + new, root, output, config, read=numbers.shape[0])
    return tree.tokens, tree.parents, tree.depth, tree.ancestors, tree.draft_logprob
