from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eagle_mars.attention import packed_attention
from eagle_mars.target import TargetModel
from eagle_mars.tree import DraftTree
from tests.tiny import VOCAB, tiny_model

TREE = DraftTree.from_parents(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 1]]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_equals_transformers_own_attention(heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    query = torch.randn(2, heads, 5, 16, generator=generator)
    key, value = torch.randn(2, 2, kv_heads, 23, 16, generator=generator)
    mask = torch.rand(2, 1, 5, 23, generator=generator) < 0.7
    mask[..., 0] = True
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    out, _ = packed_attention(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)  # fp32; a kernel may split rows otherwise


def test_a_trees_forward_reads_the_cache_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TargetModel(tiny_model("Llama"), capture_layers=(2, 4, 5))  # two query heads share a key/value head
    cache = target.new_cache(1, 64)
    target.prefill(torch.arange(3, 12).unsqueeze(0), cache)
    storages = set()
    attend = F.scaled_dot_product_attention

    def watch(query, key, value, **options):
        storages.update((key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()))
        return attend(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    target.forward_tree(TREE, cache)
    assert len(storages) == 1  # the one buffer of all layers: nothing was copied


def test_the_model_keeps_its_own_attention_even_when_a_forward_fails() -> None:
    model = tiny_model("Llama")
    target = TargetModel(model)
    cache = target.new_cache(1, 64)
    target.prefill(torch.arange(3, 12).unsqueeze(0), cache)
    target.forward_tree(TREE, cache)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        target.forward_tree(replace(TREE, tokens=TREE.tokens + VOCAB), cache)
    assert model.config._attn_implementation == "sdpa"


def test_what_it_does_not_know_is_left_to_transformers() -> None:
    with pytest.raises(ValueError, match="softcap"):
        packed_attention(torch.nn.Module(), *torch.randn(3, 1, 2, 4, 8), torch.ones(1, 1, 4, 4).bool(), softcap=30.0)
