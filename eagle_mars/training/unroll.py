"""Training-time test: the head run on its own outputs for K steps, as it will be when it drafts (EAGLE-3, section 3.1).

Step s of row t takes the output of step s-1 of the same row, the embedding of s_{t+1+s} and rotary position t+s. It
sees the step-0 keys at positions <= t, which hold true features, and its own keys of steps 1 … s: exactly what a chain
of s drafts after position t sees at inference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.layers import rotate
from eagle_mars.training.dataset import Batch
from eagle_mars.training.shards import Source


@dataclass(frozen=True)
class Step:
    """Outputs of one unrolled step and what they should predict."""

    number: int
    output: Tensor  # [Q, H] before the head's norm
    rows: Tensor  # [Q] batch rows t of the outputs
    valid: Tensor  # [Q] whether the target has a distribution of s_{t+2+s} and drew that token itself
    teacher: Tensor  # [Q] batch rows whose hidden state gives that distribution (clamped where not valid)
    token: Tensor  # [Q] s_{t+2+s} (meaningless where not valid)


def unroll(head: Eagle3Head, batch: Batch, n_steps: int) -> Iterator[Step]:
    """Yield steps 0 … n_steps-1 over the rows from each sequence's first drawn token on."""
    spans = _query_spans(batch)
    rows = torch.cat([torch.arange(q, end, device=batch.position.device) for _, q, end in spans])
    layer = head.midlayer
    attention = layer.self_attn
    x = head.fuse(batch.features)
    a = layer.attention_input(x, head.embed(batch.next_token))
    # Prompt rows are only attended to: they need keys and values, nothing else.
    keys = _heads(attention.k_proj(a), attention.kv_heads)
    values = _heads(attention.v_proj(a), attention.kv_heads)
    keys = rotate(keys, *_rotation(head, batch.position, x.dtype))
    x, a = x[rows], a[rows]
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    last = len(batch.position) - 1
    for s in range(n_steps):
        cos, sin = _rotation(head, batch.position[rows] + s, x.dtype)
        if s > 0:
            a = layer.attention_input(x, head.embed(batch.next_token[(rows + s).clamp_max(last)]))
            own_keys.append(rotate(_heads(attention.k_proj(a), attention.kv_heads), cos, sin))
            own_values.append(_heads(attention.v_proj(a), attention.kv_heads))
        queries = rotate(_heads(attention.q_proj(a), attention.heads), cos, sin)
        attended = _attend(queries, keys, values, own_keys, own_values, spans)
        x = layer.finish(x, attention.o_proj(attended))
        teacher = (rows + s + 1).clamp_max(last)
        valid = (batch.left[rows] >= s + 1) & (batch.source[teacher] != Source.PROMPT)
        yield Step(s, x, rows, valid, teacher, batch.next_token[teacher])


def _query_spans(batch: Batch) -> list[tuple[int, int, int]]:
    """(first row, first row with something to learn, end) of each sequence."""
    spans, start = [], 0
    for length in batch.lengths:
        end = start + length
        drawn = (batch.source[start:end] != Source.PROMPT).nonzero()
        first = max(start, start + int(drawn[0]) - 1) if len(drawn) else end
        spans.append((start, first, end))
        start = end
    return spans


def _heads(x: Tensor, n: int) -> Tensor:
    """[R, n·d] -> [n, R, d]"""
    return x.view(x.shape[0], n, -1).transpose(0, 1)


def _rotation(head: Eagle3Head, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tables [R, d] for positions [R]."""
    cos, sin = head.rotary(positions[None], dtype)
    return cos[0, 0], sin[0, 0]


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: list[Tensor],
    own_values: list[Tensor],
    spans: list[tuple[int, int, int]],
) -> Tensor:
    """queries [h, Q, d], keys/values [g, R, d], own ones [g, Q, d] per step -> [Q, h·d]."""
    n_heads, _, head_dim = queries.shape
    n_groups = keys.shape[0]
    outputs = []
    done = 0
    for start, first, end in spans:
        n = end - first
        own = slice(done, done + n)
        q = queries[:, own].view(n_groups, n_heads // n_groups, n, head_dim) * head_dim**-0.5
        k, v = keys[:, None, start:end], values[:, None, start:end]
        scores = q @ k.transpose(-1, -2)
        visible = torch.ones(n, end - start, dtype=torch.bool, device=q.device).tril(first - start)
        scores = scores.masked_fill(~visible, float("-inf"))
        diagonals = [(q * step_keys[:, None, own]).sum(-1, keepdim=True) for step_keys in own_keys]
        weights = torch.cat([scores, *diagonals], dim=-1).softmax(-1)
        out = weights[..., : end - start] @ v
        for j, step_values in enumerate(own_values):
            out = out + weights[..., end - start + j, None] * step_values[:, None, own]
        outputs.append(out.permute(2, 0, 1, 3).reshape(n, n_heads * head_dim))
        done += n
    return torch.cat(outputs)
