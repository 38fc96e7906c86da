from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle_mars.config import DraftConfig, VerifyConfig
from eagle_mars.cpu import PackedLinear, pack_linears
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.target import TargetModel
from tests.tiny import tiny_head, tiny_model


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 64, 65])
def test_packed_is_the_same_product(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    x = torch.randn(1, rows, 48)
    with torch.no_grad():
        packed, plain = PackedLinear(linear)(x), linear(x)
    assert packed.shape == plain.shape
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)  # fp32, another order of summation
    if rows in (1, 65):
        assert torch.equal(packed, plain)


def test_every_linear_is_replaced_and_ties_stay_tied() -> None:
    model = tiny_model("Llama", tie_word_embeddings=True)
    linears = sum(type(m) is nn.Linear for m in model.modules())
    assert pack_linears(model) == linears > 50
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_greedy_text_is_the_plain_models() -> None:
    plain, packed = tiny_model("Llama", vocab_size=16), tiny_model("Llama", vocab_size=16)
    pack_linears(packed)
    head = tiny_head(packed)
    engine = Engine(TargetModel(packed, head.config.capture_layers), head)
    request = Request(
        max_new_tokens=40, draft=DraftConfig(total_token=10, depth=3, top_k=3), verify=VerifyConfig(rule="exact")
    )
    prompt = torch.tensor([[3, 9, 4]])
    tokens = [token for step in engine.speculate(prompt, request) for token in step.tokens]
    assert tokens == plain.generate(prompt, do_sample=False, max_new_tokens=40)[0, 3:].tolist()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 65])
def test_half_precision_weights_are_rounded_once_and_multiplied_in_single_precision(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias)
    rounded = linear.weight.detach().half().float()
    x = torch.randn(1, rows, 48)
    with torch.no_grad():
        packed = PackedLinear(linear, "float16")(x)
        expected = nn.functional.linear(x, rounded, linear.bias)
    assert torch.equal(linear.weight, rounded)
    # fp32, another order of summation; had x been rounded to fp16 as well, the difference would be 1e-3
    torch.testing.assert_close(packed, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_text_is_that_of_the_rounded_model() -> None:
    rounded, packed = tiny_model("Llama", vocab_size=16), tiny_model("Llama", vocab_size=16)
    for module in rounded.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.half().float()
    pack_linears(packed, "float16")
    prompt = torch.tensor([[3, 9, 4]])
    texts = [model.generate(prompt, do_sample=False, max_new_tokens=40).tolist() for model in (rounded, packed)]
    assert texts[0] == texts[1]


def test_what_half_precision_cannot_hold_is_refused() -> None:
    linear = nn.Linear(4, 4)
    linear.weight.data[0, 0] = 7e4
    with pytest.raises(ConfigError, match="beyond ±65504"):
        pack_linears(nn.Sequential(linear), "float16")
    with pytest.raises(ConfigError, match="single precision"):
        pack_linears(nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16)), "float16")


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="on the CPU"):
        pack_linears(nn.Linear(2, 2, device="meta"))


def test_a_dtype_without_a_layout_is_refused(monkeypatch) -> None:
    def refuse(*arguments):
        raise RuntimeError("bf16 path needs the cpu support avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    with pytest.raises(ConfigError, match="AVX-512"):
        pack_linears(nn.Linear(16, 16, dtype=torch.bfloat16))
