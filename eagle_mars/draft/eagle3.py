"""The EAGLE-3 head (arXiv 2503.01840; EAGLE_SPEC section 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_mars.draft.head import Head
from eagle_mars.draft.layers import MLP, Attention, HeadConfig, RMSNorm, Start
from eagle_mars.draft.proposer import KeyValue


class Eagle3Layer(nn.Module):
    """The one decoder layer: attention over [embedding ; feature], residual around the un-normalised feature."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def attention_input(self, x: Tensor, embedding: Tensor) -> Tensor:
        """feature x, embedding [B, T, H] → [B, T, 2H], embedding first."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(x)), dim=-1)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Both residuals: x plus attention output, then the MLP."""
        y = x + attended
        return y + self.mlp(self.post_attention_layernorm(y))


class Eagle3Head(Head):
    """Three target states fused by `fc`, one layer, its own output projection over a reduced vocabulary."""

    d2t: Tensor  # offsets: target id = draft id + d2t[draft id]; absent, like t2d, when the vocabulary isn't reduced
    t2d: Tensor

    def __init__(self, config: HeadConfig, own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @property
    def num_layers(self) -> int:
        return 1

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: list[KeyValue], start: Start
    ) -> Tensor:
        cos, sin = self.rotary(positions, x.dtype)
        layer = self.midlayer
        a = layer.attention_input(x, self.embed(tokens).to(x))
        return layer.finish(x, layer.self_attn(a, cos, sin, mask, cache[0], start))

    def logits(self, output: Tensor) -> Tensor:
        return self.lm_head(self.norm(output))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        if self.config.draft_vocab_size == self.config.vocab_size:
            return draft_ids
        return draft_ids + self.d2t[draft_ids]
