"""Tiny random models of every supported family: real architectures, toy sizes, seconds to build."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

from eagle_mars.draft.eagle1 import Eagle1Head
from eagle_mars.draft.eagle3 import Eagle3Head
from eagle_mars.draft.head import Head
from eagle_mars.draft.layers import HeadConfig

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


def tiny_head(model: PreTrainedModel, eagle: int = 3, seed: int = 1, draft_ids: torch.Tensor | None = None) -> Head:
    """A random head bound to `model`; with a small vocabulary its trees still hit the target's choice now and then.

    draft_ids: ascending target ids of an EAGLE-3 head's draft vocabulary; None is the whole vocabulary.
    """
    config = model.config
    capture = (2, config.num_hidden_layers // 2, config.num_hidden_layers - 3) if eagle == 3 else ()
    sizes = HeadConfig(
        hidden_size=config.hidden_size,
        feature_size=config.hidden_size * max(len(capture), 1),
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size if draft_ids is None else len(draft_ids),
        fc_bias=eagle == 1,
        capture_layers=capture,
    )
    torch.manual_seed(seed)
    head = (Eagle3Head if eagle == 3 else Eagle1Head)(sizes, own_embedding=False).eval().requires_grad_(False)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.2)
    if draft_ids is not None:
        head.d2t.copy_(draft_ids - torch.arange(len(draft_ids)))
        head.t2d[draft_ids] = True
    head.bind(model.get_input_embeddings(), model.get_output_embeddings())
    return head
