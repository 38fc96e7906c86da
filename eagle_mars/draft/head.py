"""What the drafter asks of a head, whichever EAGLE family it is of."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from eagle_mars.draft.layers import HeadConfig, Rotary

KeyValue = tuple[Tensor, Tensor]


class Head(nn.Module, ABC):
    """One decoder layer or a few, fed with (feature of position t, embedding of token t + 1) at rotary position t.

    The embedding, and for EAGLE-1/2 the output projection, belong to the target: `bind` borrows the modules, so a
    head adds no copy of them and its `state_dict` holds exactly what an EAGLE checkpoint holds.
    """

    config: HeadConfig
    embed_tokens: nn.Module | None  # set only when the checkpoint brings its own embedding

    def __init__(self, config: HeadConfig, own_embedding: bool) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.rotary = Rotary(config)
        self._borrowed: tuple[nn.Module, nn.Module] | None = None  # a tuple, so that torch doesn't register them

    def bind(self, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        """Borrow the target's embedding and output projection."""
        self._borrowed = (embed_tokens, lm_head)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] → embeddings [B, T, H], from the head's own table or else from the target's."""
        table = self.embed_tokens if self.embed_tokens is not None else self.borrowed[0]
        return table(tokens)

    @property
    def borrowed(self) -> tuple[nn.Module, nn.Module]:
        if self._borrowed is None:
            raise RuntimeError("Head.bind(embed_tokens, lm_head) must be called before the head is used")
        return self._borrowed

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Decoder layers, each with a key/value buffer of its own."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, feature_size] → the feature stream [B, T, H] that `forward` takes."""

    @abstractmethod
    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: list[KeyValue], start: int
    ) -> Tensor:
        """One pass over T rows → [B, T, H]: the recursive feature of the next level.

        x: [B, T, H] feature stream. tokens: [B, T] target ids. positions: [B, T] rotary positions.
        mask, start: as `Attention.forward`. cache: one (keys, values) pair per layer.
        """

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """`forward`'s output [B, T, H] → draft logits [B, T, draft_vocab_size]."""

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids in the draft vocabulary → target ids, same shape."""
        return draft_ids

    def allocate(self, batch: int, capacity: int) -> list[KeyValue]:
        """Key/value buffers for `capacity` rows, in the head's dtype and on its device."""
        parameter = next(self.parameters())
        shape = (batch, self.config.num_kv_heads, capacity, self.config.head_dim)
        return [
            (
                torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
                torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
            )
            for _ in range(self.num_layers)
        ]
