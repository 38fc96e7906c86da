"""The drafting state of several requests of different lengths, which come and go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle_mars.config import DraftConfig
from eagle_mars.draft.drafter import HEADROOM, Drafter
from eagle_mars.draft.grow import grow
from eagle_mars.draft.proposer import KeyValue, Proposer
from eagle_mars.tree import DraftTree


class BatchDrafter:
    """Drafts for up to `places` sequences; each one's prompt comes from a `Drafter` of its own, by `join`.

    lengths: real rows of each sequence. Draft rows, and the padding of a ragged `extend`, go behind them and are
    overwritten.
    """

    def __init__(self, head: Proposer, config: DraftConfig, places: int) -> None:
        self.head = head
        self.config = config
        self.places = places
        self.lengths: list[int] = []
        self._capacity = 0
        self._cache: list[KeyValue] = []
        parameter = next(head.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._output = torch.empty(0)  # [B, 1, H] the head's output at each sequence's newest real row

    @torch.no_grad()
    def join(self, drafter: Drafter) -> None:
        """Copy the only sequence of `drafter`, which has been fed its prompt, behind the others."""
        if drafter.output is None:
            raise RuntimeError("a drafter joins after its first `extend`")
        row, length = len(self.lengths), drafter.rows
        self._reserve([*self.lengths, length])
        for ours, theirs in zip(self._cache, drafter.cache, strict=True):
            for target, source in zip(ours, theirs, strict=True):
                _move_in(target[row], source[0], length)
        self._output = drafter.output if row == 0 else torch.cat((self._output, drafter.output))
        self.lengths.append(length)

    def drop(self, row: int) -> None:
        """Forget a sequence; the last one moves into its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            for pair in self._cache:
                for buffer in pair:
                    _move_in(buffer[row], buffer[last], length)
            self.lengths[row] = length
            self._output[row] = self._output[last]
        self.lengths.pop()
        self._output = self._output[:last]

    @torch.no_grad()
    def extend(self, features: Sequence[Tensor | None], next_tokens: Sequence[Tensor]) -> None:
        """Append real rows to each sequence: root and accepted drafts of its cycle; nothing right after it joined.

        features: per sequence [1, T_b, F], or None for a draft model. next_tokens: per sequence [1, T_b], T_b >= 0.
        """
        counts = [tokens.shape[1] for tokens in next_tokens]
        longest = max(counts)
        if longest == 0:
            return
        self._reserve(self.lengths, longest)
        tokens = pad_sequence([t[0].to(self._device) for t in next_tokens], batch_first=True)
        x = torch.empty(*tokens.shape, 0, device=self._device, dtype=self._dtype)
        if features[0] is not None:
            x = pad_sequence([f[0] for f in features if f is not None], batch_first=True)
        start = torch.tensor(self.lengths, device=self._device)
        positions = start.unsqueeze(1) + torch.arange(longest, device=self._device)
        end = max(self.lengths) + longest
        mask = (torch.arange(end, device=self._device) <= positions.unsqueeze(-1)).unsqueeze(1)
        x = self.head.fuse(x.to(device=self._device, dtype=self._dtype))
        output = self.head(x, tokens, positions, mask, self._in_use(), start)
        count = torch.tensor(counts, device=self._device).view(-1, 1, 1)
        newest = output.gather(1, (count - 1).clamp(min=0).expand(-1, 1, output.shape[-1]))
        self._output = torch.where(count > 0, newest, self._output)
        self.lengths = [length + n for length, n in zip(self.lengths, counts, strict=True)]

    @torch.no_grad()
    def grow(self, roots: Tensor) -> DraftTree:
        """One draft tree under each of roots [B]: the tokens that ended the last `extend`."""
        self._reserve(self.lengths)
        return grow(self.head, self._in_use(), self.lengths, roots.to(self._device), self._output, self.config)

    def _in_use(self) -> list[KeyValue]:
        n = len(self.lengths)
        return [(keys[:n], values[:n]) for keys, values in self._cache]

    def _reserve(self, lengths: Sequence[int], more: int = 0) -> None:
        """Room for sequences of these lengths, `more` real rows for each, and the scratch rows of one tree."""
        needed = max(lengths) + more + self.config.depth * self.config.top_k
        if needed <= self._capacity:
            return
        self._capacity = max(2 * self._capacity, needed + HEADROOM)
        grown = self.head.allocate(self.places, self._capacity)
        for pair in grown:
            for buffer in pair:
                buffer.zero_()  # shorter sequences read, masked, what lies behind them: 0 * NaN would be NaN
        for new, old in zip(grown, self._cache, strict=False):  # the first time there is nothing to move
            for target, source in zip(new, old, strict=True):
                target[:, :, : source.shape[2]] = source
        self._cache = grown


def _move_in(place: Tensor, source: Tensor, length: int) -> None:
    """Copy rows [kv_heads, :length, d]; zeros behind them, for the reason that `TreeCache` has."""
    place[:, :length] = source[:, :length]
    place[:, length:] = 0
