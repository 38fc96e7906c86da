"""Tiny random models of every supported family: real architectures, toy sizes, seconds to build."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 96

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": None},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen3Moe": {"num_experts": 4, **_MOE},
    "Gemma": {"head_dim": 16},
}


def tiny_model(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random fp32 causal LM of `family`, with logits spread enough that greedy choices aren't ties."""
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    config = config_class(**{**_COMMON, **FAMILIES.get(family, {}), **overrides})
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
