"""What EAGLE heads of all families share: features in, and modules borrowed from the target."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from eagle_mars.draft.layers import HeadConfig, Rotary
from eagle_mars.draft.proposer import KeyValue, Proposer


class Head(Proposer):
    """One decoder layer or a few, fed with (feature of position t, embedding of token t + 1) at rotary position t.

    The embedding, and for EAGLE-1/2 the output projection, belong to the target: `bind` borrows the modules, so a
    head adds no copy of them and its `state_dict` holds exactly what an EAGLE checkpoint holds.
    """

    config: HeadConfig
    embed_tokens: nn.Module | None  # set only when the checkpoint brings its own embedding
    first_row = 1

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
    def capture_layers(self) -> tuple[int, ...]:
        return self.config.capture_layers

    @property
    def draft_vocab_size(self) -> int:
        return self.config.draft_vocab_size

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Decoder layers, each with a key/value buffer of its own."""

    def allocate(self, batch: int, capacity: int) -> list[KeyValue]:
        parameter = next(self.parameters())
        shape = (batch, self.config.num_kv_heads, capacity, self.config.head_dim)
        return [
            (
                torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
                torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
            )
            for _ in range(self.num_layers)
        ]
