"""The embedded head is an EAGLE-3 checkpoint as EAGLE's code and SpecForge write it and vLLM and SGLang read it.

Both layouts have the same names and shapes: EAGLE_SPEC 1.1, and the vLLM run of ENGINES.md.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from eagle_mars.embedded import embedded_head_path

# SmolLM2-135M: H, heads, key/value heads, head dim, I, V; and the draft vocabulary.
H, N_HEADS, N_KV, D, FFN, V, DV = 576, 9, 3, 64, 1536, 49152, 8192
SHAPES = {
    "fc.weight": (H, 3 * H),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (N_HEADS * D, 2 * H),
    "midlayer.self_attn.k_proj.weight": (N_KV * D, 2 * H),
    "midlayer.self_attn.v_proj.weight": (N_KV * D, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, N_HEADS * D),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.mlp.gate_proj.weight": (FFN, H),
    "midlayer.mlp.up_proj.weight": (FFN, H),
    "midlayer.mlp.down_proj.weight": (H, FFN),
    "norm.weight": (H,),
    "lm_head.weight": (DV, H),
    "d2t": (DV,),
    "t2d": (V,),
}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return load_file(embedded_head_path() / "model.safetensors")


def test_names_shapes_and_types(state):
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == SHAPES
    types = {"d2t": torch.int64, "t2d": torch.bool}
    assert {name: tensor.dtype for name, tensor in state.items()} == {
        name: types.get(name, torch.bfloat16) for name in SHAPES
    }
    assert (embedded_head_path() / "model.safetensors").stat().st_size <= 22e6


def test_d2t_is_an_offset_and_t2d_marks_the_same_ids(state):
    ids = torch.arange(DV) + state["d2t"]
    assert torch.equal(state["t2d"].nonzero().squeeze(-1), ids)


def test_the_config_names_the_architecture_and_the_sizes():
    config = json.loads((embedded_head_path() / "config.json").read_text("utf-8"))
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV,
        "head_dim": D,
        "intermediate_size": FFN,
        "vocab_size": V,
        "draft_vocab_size": DV,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": 100000.0,
    }
    assert {name: config[name] for name in expected} == expected
