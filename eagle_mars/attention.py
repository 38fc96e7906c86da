"""Masked attention that doesn't copy the cache.

Under grouped-query attention, transformers repeats keys and values for each query head as soon as there is a mask. A
draft tree needs one, so every layer of every cycle would copy the whole cache, once per head of a group. But the query
heads that share a key/value head are nothing else than more query rows for it: folded into the rows, no key is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "eagle_mars_packed"
_BEYOND_A_MASK = (
    "softcap",
    "position_bias",
    "s_aux",
    "output_attentions",
)  # transformers' own function knows or refuses


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function for inference under a mask that all heads share.

    query: [B, heads, T, d]. key, value: [B, kv_heads, rows, d]. attention_mask: [B or 1, 1, T, rows] bool, True is
    visible. Returns [B, T, heads, d].
    """
    if attention_mask is None or any(options.get(name) is not None for name in _BEYOND_A_MASK):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    batch, heads, rows, size = query.shape
    groups = heads // key.shape[1]
    out = F.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * rows, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        scale=scaling,
    )
    return out.view(batch, heads, rows, value.shape[-1]).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, packed_attention)


@contextmanager
def packed_queries(config: PretrainedConfig) -> Iterator[None]:
    """Within it, the model of this text config attends by `packed_attention`: layers look the name up at each call."""
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = before
