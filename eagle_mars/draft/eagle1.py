"""The EAGLE-1/2 head (arXiv 2401.15077, 2406.16858; EAGLE_SPEC section 2): the two differ in the tree only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_mars.draft.head import Head
from eagle_mars.draft.layers import MLP, Attention, HeadConfig, RMSNorm, Start
from eagle_mars.draft.proposer import KeyValue


class Eagle1Layer(nn.Module):
    """A decoder layer; the first one has no norm in front of its attention, since `fc` mixes un-normalised inputs."""

    def __init__(self, config: HeadConfig, first: bool) -> None:
        super().__init__()
        self.input_layernorm = None if first else RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, kv: KeyValue, start: Start) -> Tensor:
        """x [B, T, H] → [B, T, H]; the rest as `Attention.forward`."""
        a = x if self.input_layernorm is None else self.input_layernorm(x)
        y = x + self.self_attn(a, cos, sin, mask, kv, start)
        return y + self.mlp(self.post_attention_layernorm(y))


class Eagle1Head(Head):
    """Predicts the target's next final state, so its draft logits come from the target's own `lm_head`."""

    def __init__(self, config: HeadConfig, own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        self.fc = nn.Linear(config.hidden_size + config.feature_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(Eagle1Layer(config, first=j == 0) for j in range(config.num_layers))

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: list[KeyValue], start: Start
    ) -> Tensor:
        cos, sin = self.rotary(positions, x.dtype)
        x = self.fc(torch.cat((self.embed(tokens).to(x), x), dim=-1))
        for layer, kv in zip(self.layers, cache, strict=True):
            x = layer(x, cos, sin, mask, kv, start)
        return x

    def logits(self, output: Tensor) -> Tensor:
        return self.borrowed[1](output).to(output.device)  # a target spread over devices may keep its lm_head elsewhere
