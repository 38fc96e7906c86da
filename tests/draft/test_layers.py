"""Rotary tables: exact at any position and in any dtype, and each scaling equal to its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_mars.draft.layers import HeadConfig, RMSNorm, Rotary
from tests.draft.heads import random_head

DIM = 16


def rotary(**changes: Any) -> Rotary:
    shape = {"head_dim": DIM, "max_position_embeddings": 64, **changes}
    return Rotary(HeadConfig(32, 96, 48, 2, 2, vocab_size=60, draft_vocab_size=40, **shape))


def exact_angles(positions: torch.Tensor, theta: float) -> torch.Tensor:
    exponents = torch.arange(0, DIM, 2, dtype=torch.float64) / DIM
    angles = positions.double().unsqueeze(-1) * theta**-exponents
    return torch.cat((angles, angles), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_beyond_the_trained_length_stay_accurate(dtype: torch.dtype) -> None:
    """The released code is off by up to 2 at position 3000 in bf16 (EAGLE_SPEC D1)."""
    head = random_head().to(dtype)  # the cast that spoils the released frequencies
    positions = torch.tensor([[0, 1, 63, 64, 2047, 3000, 30000]])
    exponents = torch.arange(0, 8, 2, dtype=torch.float64) / 8
    angles = (positions.double().unsqueeze(-1) * 10000**-exponents).repeat(1, 1, 2)
    cos, sin = head.rotary(positions, dtype)
    # Half an ulp of the dtype at 1, and an fp32 angle of 30000 is good to 2**-10.
    tolerance = torch.finfo(dtype).eps / 2 + 2**-9
    assert (cos[:, 0].double() - angles.cos()).abs().max() < tolerance
    assert (sin[:, 0].double() - angles.sin()).abs().max() < tolerance


def test_base_is_the_configs() -> None:
    positions = torch.arange(50).unsqueeze(0)
    cos, _ = rotary(rope_theta=500.0)(positions, torch.float32)
    torch.testing.assert_close(cos[:, 0], exact_angles(positions, 500.0).cos().float(), atol=1e-5, rtol=0)


def test_linear_scaling_ignores_theta_as_the_released_heads_do() -> None:
    positions = torch.arange(200).unsqueeze(0)
    cos, _ = rotary(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})(positions, torch.float32)
    torch.testing.assert_close(cos[:, 0], exact_angles(positions / 4, 10000.0).cos().float(), atol=1e-5, rtol=0)


def llama_config(rope_type: str, **parameters: float) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        head_dim=DIM,
        max_position_embeddings=64,
        rope_parameters={"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
    )


def test_dynamic_scaling_starts_at_the_trained_length() -> None:
    config = llama_config("dynamic", factor=2.0)
    scaled = rotary(rope_scaling={"type": "dynamic", "factor": 2.0})
    for position in (0, 10, 63, 64, 150, 1000):
        inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=position + 1)
        cos, _ = scaled(torch.tensor([[position]]), torch.float32)
        torch.testing.assert_close(cos[0, 0, 0, : DIM // 2], (position * inv_freq).cos(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (
            "llama3",
            {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 64}),
    ],
)
def test_other_scalings_are_transformers(kind: str, parameters: dict[str, float]) -> None:
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[kind](llama_config(kind, **parameters), torch.device("cpu"))
    positions = torch.arange(300).unsqueeze(0)
    cos, sin = rotary(rope_scaling={"type": kind, **parameters})(positions, torch.float32)
    angles = positions.unsqueeze(-1).float() * inv_freq
    torch.testing.assert_close(cos[:, 0, :, : DIM // 2], angles.cos() * magnitude)
    torch.testing.assert_close(sin[:, 0, :, : DIM // 2], angles.sin() * magnitude)
    assert (magnitude > 1) == (kind == "yarn")


def test_norm_casts_before_it_scales() -> None:
    """In half precision weight * cast(x / rms) and cast(weight * x / rms) differ; EAGLE's heads do the former."""
    norm = RMSNorm(64, 1e-6).to(torch.bfloat16)
    torch.manual_seed(0)
    norm.weight.data = torch.randn(64).to(torch.bfloat16)
    x = torch.randn(8, 64).to(torch.bfloat16)
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(norm(x), norm.weight * scaled.to(torch.bfloat16))
    assert not torch.equal(norm(x), (norm.weight.float() * scaled).to(torch.bfloat16))
