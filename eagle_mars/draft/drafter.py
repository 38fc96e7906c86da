"""One request's drafting state: the proposer's key/value rows, and the trees grown on top of them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.config import DraftConfig
from eagle_mars.draft.grow import grow
from eagle_mars.draft.proposer import KeyValue, Proposer
from eagle_mars.errors import ConfigError
from eagle_mars.tree import DraftTree

_CHUNK = 512  # prompt rows per head pass: bounds the mask and the activations of long prompts
HEADROOM = 256  # rows to spare in the first buffer, so that short answers never reallocate


class Drafter:
    """Drafts for `batch` sequences of equal length with a shared, stateless proposer.

    A head's row t pairs the target's feature of position t with token t + 1 and sits at rotary position t, so a
    sequence of L tokens, the newest included, has L - 1 rows; a draft model has a row per token. Draft rows go behind
    the real ones and are overwritten by the next `extend`: a cycle neither copies nor allocates key/value memory.

    Raises ConfigError if `config.top_k` is more than the draft vocabulary.
    """

    def __init__(self, head: Proposer, config: DraftConfig, batch: int = 1) -> None:
        if config.top_k > head.draft_vocab_size:
            raise ConfigError(
                f"top_k={config.top_k} is more than the draft vocabulary of {head.draft_vocab_size} tokens; "
                "lower top_k."
            )
        self.head = head
        self.config = config
        self.batch = batch
        self.rows = 0
        self._capacity = 0
        self.cache: list[KeyValue] = []
        self.output: Tensor | None = None
        parameter = next(head.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype

    @torch.no_grad()
    def extend(self, features: Tensor | None, next_tokens: Tensor) -> None:
        """Append real rows: the whole prompt first, then root and accepted drafts of every cycle.

        features: [B, T, F] target features; None for a draft model. next_tokens: [B, T] int64, the token after each of
        them, a draft model's from the prompt's first on; the last one is the root of the next tree. T >= 1.
        """
        next_tokens = next_tokens.to(self._device)
        if features is None:
            features = torch.empty(*next_tokens.shape, 0)
        features = features.to(device=self._device, dtype=self._dtype)
        self._reserve(self.rows + next_tokens.shape[1])
        for piece, tokens in zip(features.split(_CHUNK, dim=1), next_tokens.split(_CHUNK, dim=1), strict=True):
            end = self.rows + tokens.shape[1]
            positions = torch.arange(self.rows, end, device=self._device).expand_as(tokens)
            mask = None
            if self.rows:
                mask = (torch.arange(end, device=self._device) <= positions.unsqueeze(-1)).unsqueeze(1)
            output = self.head(self.head.fuse(piece), tokens, positions, mask, self.cache, self.rows)
            self.output, self.rows = output[:, -1:], end

    @torch.no_grad()
    def grow(self, root: Tensor) -> DraftTree:
        """The draft tree under `root` [B]: the token that ended the last `extend`."""
        if self.output is None:
            raise RuntimeError("Drafter.extend must be called with the prompt's features before grow")
        return grow(self.head, self.cache, self.rows, root.to(self._device), self.output, self.config)

    def draft(self, features: Tensor | None, next_tokens: Tensor) -> DraftTree:
        """`extend`, then `grow` under the last of the tokens."""
        self.extend(features, next_tokens)
        return self.grow(next_tokens[:, -1])

    def _reserve(self, rows: int) -> None:
        """Room for `rows` real rows and the scratch rows of one tree; doubling keeps the total copying linear."""
        needed = rows + self.config.depth * self.config.top_k
        if needed <= self._capacity:
            return
        self._capacity = max(2 * self._capacity, needed + HEADROOM)
        grown = self.head.allocate(self.batch, self._capacity)
        for new, old in zip(grown, self.cache, strict=False):  # the first time there is nothing to move
            for target, source in zip(new, old, strict=True):
                target[:, :, : self.rows] = source[:, :, : self.rows]
        self.cache = grown
