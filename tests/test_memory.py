from __future__ import annotations

import gc

import pytest
import torch
from transformers import LlamaConfig, Qwen3MoeConfig

from eagle_mars import EaModel, VerifyConfig
from eagle_mars.config import DraftConfig
from eagle_mars.errors import ConfigError
from eagle_mars.memory import TargetSize, memory
from tests.tiny import FAMILIES, tiny_model

LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str) -> None:
    model = tiny_model(family)
    size = TargetSize.of(model.config)
    matrices = {id(p): p.numel() for n, p in model.named_parameters() if p.dim() > 1 and "mlp.gate.weight" not in n}
    assert size.parameters == sum(matrices.values())


def test_published_models_have_their_published_sizes() -> None:
    qwen = Qwen3MoeConfig(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    assert TargetSize.of(LLAMA_70B).parameters == pytest.approx(70.6e9, rel=0.01)  # the model cards' numbers
    assert TargetSize.of(qwen).parameters == pytest.approx(235e9, rel=0.01)
    assert TargetSize.of(qwen).active == pytest.approx(22e9, rel=0.02)


def test_a_configs_missing_size_is_told() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        TargetSize.of(type("Config", (), {"hidden_size": 8})())


def test_cache_and_weights_are_shared_and_the_head_is_not() -> None:
    size, draft = TargetSize.of(LLAMA_70B), DraftConfig()
    one, four = (memory(size, 10**9, draft, 4096, 512, devices=devices) for devices in (1, 4))
    assert (one.weights, one.cache) == (4 * four.weights, 4 * four.cache)
    assert (one.head, one.head_cache) == (four.head, four.head_cache)
    assert one.cache == (4096 + 512 + 60) * 2 * 80 * 8 * 128 * 2  # bf16: 320 KiB a row
    assert one.peak > one.weights + one.cache
    assert memory(size, 10**9, draft, 4096, 512, weight=0.5).weights == one.weights / 4


def test_the_cache_is_as_large_as_computed(tiny_pair) -> None:
    """A long prompt is allocated once, with room for its answer."""
    ea = EaModel.from_pretrained(*tiny_pair, 12, 3, 4, prefill_chunk=64)
    size = TargetSize.of(ea.config)
    cache = ea.target.new_cache(1, 300 + 40 + 12)
    ea.target.prefill(torch.zeros(1, 300, dtype=torch.long), cache)
    expected = memory(size, 0, ea.draft, 300, 40, number=4)
    assert sum(buffer.nbytes for buffer in cache._buffers) == expected.cache


def test_responses_leave_nothing_behind(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, 12, 3, 4, prefill_chunk=16)

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    counts = []
    for index in range(9):
        ea.generate("a prompt of several chunks", max_new_tokens=6, verify=VerifyConfig(rule="exact"))
        for piece in ea.stream("abc", max_new_tokens=20):  # given up in the middle
            assert piece is not None
            break
        if index % 3 == 2:
            counts.append(live())
    assert len(set(counts)) == 1
