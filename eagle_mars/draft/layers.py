"""Building blocks of the draft heads, with EAGLE's parameter names (EAGLE_SPEC sections 1.1, 1.2, 2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft head, as `draft.checkpoint` derives it from the files (shapes win over config.json).

    feature_size: width of one target feature bundle: three taps for EAGLE-3, one hidden state for EAGLE-1/2.
    capture_layers: decoder layers whose *inputs* form the bundle; empty: the state after the final norm (EAGLE-1/2).
    """

    hidden_size: int
    feature_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    max_position_embeddings: int = 2048
    num_layers: int = 1
    fc_bias: bool = False
    qkv_bias: bool = False
    capture_layers: tuple[int, ...] = ()


class RMSNorm(nn.Module):
    """Mean square in fp32, cast back, then the weight: the order matters in half precision (EAGLE_SPEC 1.2)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Rotary:
    """Half-split rotary embedding whose tables are computed on demand, in fp32, for the positions asked for.

    Nothing is cached at load, so no cast of the head can touch the frequencies and no position is out of range
    (EAGLE_SPEC defect D1: the released tables collapse beyond `max_position_embeddings` in half precision).

    "linear" and "dynamic" scaling follow the released heads, which ignore `rope_theta` as soon as either is set
    (EAGLE_SPEC 1.3); "llama3" and "yarn", of heads trained elsewhere, follow transformers.
    """

    SCALINGS = ("linear", "dynamic", "llama3", "yarn")

    def __init__(self, config: HeadConfig) -> None:
        # An explicit device: heads are built on the meta device, and these numbers are no parameters to be loaded.
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        scaling = config.rope_scaling
        self.magnitude = 1.0
        self.stretch: float | None = None  # only "dynamic" has frequencies that depend on the position
        if scaling is None:
            self.inv_freq = 1.0 / config.rope_theta**exponents
        elif scaling["type"] == "linear":
            self.inv_freq = 1.0 / 10000.0**exponents / float(scaling["factor"])
        elif scaling["type"] == "dynamic":
            self.inv_freq = 1.0 / 10000.0**exponents
            self.stretch = float(scaling["factor"])
        else:
            initialise = ROPE_INIT_FUNCTIONS[scaling["type"]]
            self.inv_freq, self.magnitude = initialise(_llama_config(config, scaling), torch.device("cpu"))
        self.exponents = exponents * config.head_dim / max(config.head_dim - 2, 1)
        self.trained_length = config.max_position_embeddings

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, T] → cos, sin [B, 1, T, head_dim] in `dtype`."""
        if self.inv_freq.device != positions.device:
            self.inv_freq, self.exponents = self.inv_freq.to(positions.device), self.exponents.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        if self.stretch is not None:
            # NTK: the base that a sequence ending at this position would use; rows already cached keep theirs.
            length = (positions.unsqueeze(-1) + 1).float() / self.trained_length
            angles = angles / (self.stretch * length - (self.stretch - 1)).clamp(min=1) ** self.exponents
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.magnitude != 1.0:
            cos, sin = cos * self.magnitude, sin * self.magnitude
        return cos.to(dtype), sin.to(dtype)


def _llama_config(config: HeadConfig, scaling: dict[str, Any]) -> LlamaConfig:
    """What transformers' rotary functions want to see of a head."""
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**scaling, "rope_type": scaling["type"], "rope_theta": config.rope_theta},
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the half-split rotation to x [B, heads, T, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


Start = int | Tensor  # the first row to write: one for all sequences, or [B] int64


def write_rows(buffer: Tensor, new: Tensor, start: Start) -> None:
    """Write new [B, kv_heads, T, d] into buffer [B, kv_heads, capacity, d] from row `start` on: one for all, or [B]."""
    rows = new.shape[2]
    if isinstance(start, int):
        buffer[:, :, start : start + rows] = new
        return
    sequences = torch.arange(buffer.shape[0], device=buffer.device).unsqueeze(1)
    buffer[sequences, :, start.unsqueeze(1) + torch.arange(rows, device=buffer.device)] = new.transpose(1, 2)


class Attention(nn.Module):
    """Grouped-query attention that reads and writes a preallocated key/value buffer."""

    def __init__(self, config: HeadConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, input] → rotated q [B, heads, T, d], rotated k and v [B, kv_heads, T, d]."""
        batch, rows, _ = x.shape
        q = self.q_proj(x).view(batch, rows, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, rows, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, rows, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, kv: tuple[Tensor, Tensor], start: Start
    ) -> Tensor:
        """Write the rows of x at `start` into kv and attend to everything up to them.

        x: [B, T, input]. mask: [B or 1, 1, T, rows to be read] bool, True is visible; None is causal with start = 0.
        kv: keys and values, each [B, kv_heads, capacity, d]. start: one for all sequences, or [B].
        """
        q, k, v = self.project(x, cos, sin)
        end = x.shape[1] if mask is None else mask.shape[-1]
        keys, values = kv
        write_rows(keys, k, start)
        write_rows(values, v, start)
        out = F.scaled_dot_product_attention(
            q,
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Gated MLP without biases."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
