from __future__ import annotations

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_mars.causal_lm import refuse_unfit
from eagle_mars.errors import ConfigError, ContextLengthError, UnsupportedTargetError
from eagle_mars.target import TargetModel, check_context
from eagle_mars.tree import DraftTree
from tests.tiny import FAMILIES, VOCAB, tiny_model

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]


def random_tree(parents: list[int], seed: int = 0) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (1, len(parents)), generator=generator)
    return DraftTree.from_parents(tokens, torch.tensor([parents]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tree_rows_equal_the_plain_forward_of_each_path(family: str, attention: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation(attention)
    target = TargetModel(model, capture_layers=(2, 4, 5))
    prompt = torch.randint(3, VOCAB, (1, 11), generator=torch.Generator().manual_seed(1))
    cache = target.new_cache(1, 64)
    target.prefill(prompt, cache)
    tree = random_tree(PARENTS)
    out = target.forward_tree(tree, cache)
    assert out.features is not None
    for path in tree.paths()[0]:
        ids = torch.cat((prompt, tree.tokens[:, path]), dim=1)
        with torch.no_grad():
            plain = model(ids, output_hidden_states=True)
        # fp32 sums in another order: a mask changes the attention kernel
        torch.testing.assert_close(out.logits[0, path], plain.logits[0, 11:], atol=2e-4, rtol=1e-4)
        taps = torch.cat([plain.hidden_states[i] for i in (2, 4, 5)], dim=-1)
        torch.testing.assert_close(out.features[0, path], taps[0, 11:], atol=2e-4, rtol=1e-4)


def test_final_state_is_the_feature_when_no_layer_is_tapped() -> None:
    model = tiny_model("Llama")
    target = TargetModel(model)
    prompt = torch.arange(3, 12).unsqueeze(0)
    out = target.prefill(prompt, target.new_cache(1, 32))
    with torch.no_grad():
        state = model.model(prompt).last_hidden_state
    torch.testing.assert_close(out.features, state, atol=1e-5, rtol=1e-5)  # same kernel, other buffer


def test_chunked_prefill_equals_one_piece_and_keeps_only_the_last_logits() -> None:
    model = tiny_model("Llama")
    target, chunked = (TargetModel(model, (2, 4, 5), prefill_chunk=rows) for rows in (64, 16))
    prompt = torch.randint(3, VOCAB, (1, 50), generator=torch.Generator().manual_seed(2))
    whole = target.prefill(prompt, target.new_cache(1, 64))
    cache = chunked.new_cache(1, 64)
    pieces = list(chunked.prefill_chunks(prompt, cache))
    assert cache.committed == 50
    assert [piece.features.shape[1] for piece in pieces if piece.features is not None] == [16, 16, 16, 2]
    assert all(piece.logits.shape == (1, 1, VOCAB) for piece in [whole, *pieces])
    features = torch.cat([piece.features for piece in pieces if piece.features is not None], dim=1)
    torch.testing.assert_close(whole.logits, pieces[-1].logits, atol=1e-4, rtol=1e-4)  # masked kernel against causal
    torch.testing.assert_close(whole.features, features, atol=1e-4, rtol=1e-4)


def test_pieces_of_a_long_prompt_are_shorter_so_that_masks_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_mars.target._MASK_ELEMENTS", 2 * 200 * 20)  # two query heads per key/value head
    monkeypatch.setattr("eagle_mars.target._SMALLEST_CHUNK", 5)
    target = TargetModel(tiny_model("Llama"))
    for length, rows in ((100, 40), (200, 20), (1000, 5)):
        prompt = torch.zeros(1, length, dtype=torch.long)
        first = next(target.prefill_chunks(prompt, target.new_cache(1, length)))
        assert first.features is not None
        assert first.features.shape[1] == rows


def test_a_chunk_without_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefill_chunk=0"):
        TargetModel(tiny_model("Llama"), prefill_chunk=0)


def test_nothing_stays_on_the_model_between_calls() -> None:
    model = tiny_model("Llama")
    target = TargetModel(model, capture_layers=(2, 4, 5))
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        before = model(ids).logits
    cache = target.new_cache(1, 64)
    target.prefill(ids, cache)
    target.forward_tree(random_tree(PARENTS), cache)
    with torch.no_grad():
        after = model(ids).logits
    assert torch.equal(before, after)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_hooks_go_even_when_the_forward_fails() -> None:
    model = tiny_model("Llama")
    target = TargetModel(model, capture_layers=(2, 4, 5))
    with pytest.raises(IndexError):
        target.prefill(torch.tensor([[VOCAB + 5]]), target.new_cache(1, 64))
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_either_spelling_of_the_cache_keyword(keyword: str, monkeypatch) -> None:
    """transformers renamed it in 5.1x; only one of the two is in the installed version."""
    model = tiny_model("Llama")
    forward = model.forward
    native = "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
    prompt = torch.arange(3, 12).unsqueeze(0)
    plain = TargetModel(model, (2, 4, 5))
    expected = plain.prefill(prompt, plain.new_cache(1, 32))

    def old(input_ids, attention_mask=None, position_ids=None, past_key_values=None, **options):
        return forward(input_ids, attention_mask, position_ids, **{native: past_key_values}, **options)

    def new(input_ids, attention_mask=None, position_ids=None, cache=None, **options):
        return forward(input_ids, attention_mask, position_ids, **{native: cache}, **options)

    monkeypatch.setattr(model, "forward", new if keyword == "cache" else old)
    target = TargetModel(model, (2, 4, 5))
    cache = target.new_cache(1, 32)
    assert torch.equal(target.prefill(prompt, cache).logits, expected.logits)
    assert cache.committed == 9


def test_positions_never_pass_the_end_of_the_context() -> None:
    target = TargetModel(tiny_model("Llama", max_position_embeddings=16), capture_layers=(2, 4, 5))
    cache = target.new_cache(1, 64)
    target.prefill(torch.randint(3, VOCAB, (1, 14)), cache)
    assert target.forward_tree(random_tree([-1, 0, 1, 2, 3]), cache).logits.isfinite().all()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny_model("Mistral", sliding_window=64), "sliding window of 64"),
        (lambda: tiny_model("Gemma2", sliding_window=32), "sliding window of 32"),
        (lambda: tiny_model("Mamba", state_size=4), "recurrent"),
        (lambda: _from_config("t5", d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=64), "encoder"),
        (lambda: _from_config("bloom", hidden_size=16, n_layer=2, n_head=2, vocab_size=64), "max_position_embeddings"),
    ],
)
def test_unfit_models_are_refused_with_the_reason(make, reason: str) -> None:
    with pytest.raises(UnsupportedTargetError, match=reason):
        refuse_unfit(make())


def test_flash_attention_is_refused_with_the_way_out() -> None:
    model = tiny_model("Llama")
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UnsupportedTargetError, match='attn_implementation="sdpa"'):
        refuse_unfit(model)


def test_a_window_wider_than_the_context_is_no_window() -> None:
    refuse_unfit(tiny_model("Mistral", sliding_window=4096))


def test_context_check_names_both_numbers() -> None:
    target = TargetModel(tiny_model("Llama"))
    check_context(target, 1000, 24)
    with pytest.raises(ContextLengthError, match="lower max_new_tokens to 24"):
        check_context(target, 1000, 25)
    with pytest.raises(ContextLengthError, match="1024 tokens but the target's context is 1024"):
        check_context(target, 1024, 1)


def _from_config(kind: str, **sizes):
    from transformers import AutoModelForSeq2SeqLM

    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    return auto.from_config(AutoConfig.for_model(kind, **sizes))
