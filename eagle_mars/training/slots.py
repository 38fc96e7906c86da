"""Keys and values of independent decode slots, and the attention that reads each slot at its own length.

Rows of a decode batch are at different positions. Padding them to the longest would read twice the memory, and on a
CPU that read is a third of a step; so each row attends to exactly its own prefix.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "eagle_mars_slots"


class Slots:
    """Preallocated keys/values [slots, kv_heads, max_length, head_dim] per layer, plus each slot's length."""

    def __init__(self, model: PreTrainedModel, n_slots: int, max_length: int) -> None:
        config = model.config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (n_slots, config.num_key_value_heads, max_length, head_dim)
        like: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        self.keys = [torch.zeros(shape, **like) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, **like) for _ in range(config.num_hidden_layers)]
        self.rows: list[int] = []
        self.lengths = [0] * n_slots

    def select(self, rows: list[int]) -> None:
        """Name the slots that the rows of the next forward belong to."""
        self.rows = rows

    def advance(self) -> None:
        """Count the token that the last forward appended to each selected slot."""
        for row in self.rows:
            self.lengths[row] += 1

    def share_prefix(self) -> None:
        """Copy what slot 0 holds to every slot."""
        n = self.lengths[0]
        for buffer in (*self.keys, *self.values):
            buffer[1:, :, :n] = buffer[:1, :, :n]
        self.lengths = [n] * len(self.lengths)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    slots: Slots,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [B, h, 1, d], key/value [B, g, 1, d] -> [B, 1, h, d]; appends to the slots, whose lengths stay."""
    n_heads, head_dim = query.shape[1], query.shape[3]
    keys, values = slots.keys[module.layer_idx], slots.values[module.layer_idx]
    n_groups = keys.shape[1]
    at = [slots.lengths[row] for row in slots.rows]
    keys[slots.rows, :, at], values[slots.rows, :, at] = key[:, :, 0], value[:, :, 0]
    # The query heads of one group stand as query rows: no repeated keys, no mask.
    queries = query.view(-1, 1, n_groups, n_heads // n_groups, head_dim).unbind(0)
    out = [
        F.scaled_dot_product_attention(q, keys[row, None, :, : n + 1], values[row, None, :, : n + 1], scale=scaling)
        for q, row, n in zip(queries, slots.rows, at, strict=True)
    ]
    return torch.stack(out).view(-1, 1, n_heads, head_dim), None


def use_slots(model: PreTrainedModel) -> None:
    """Let ``model`` attend through ``slots=...`` of its forward call instead of a cache."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    model.set_attn_implementation(ATTENTION_NAME)
