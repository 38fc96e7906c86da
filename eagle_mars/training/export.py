"""Write a trained head as an EAGLE-3 checkpoint (EAGLE_SPEC 1.1, 1.3)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_mars.draft.eagle3 import Eagle3Head


def export_head(head: Eagle3Head, scales: Tensor, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """model.safetensors and config.json in ``directory``; the feature scales [3] are folded into ``fc``.

    The embedding stays out: a head borrows the target's.
    """
    config = head.config
    state = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items() if name != "embed_tokens.weight"}
    state["fc.weight"] = state["fc.weight"] / scales.cpu().repeat_interleave(config.hidden_size)
    state = {k: v.to(dtype).contiguous() if v.is_floating_point() else v.contiguous() for k, v in state.items()}
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".model.safetensors.partial-{os.getpid()}"
    save_file(state, partial, metadata={"format": "pt"})
    _write(directory / "config.json", json.dumps(_eagle_config(head, dtype), indent=2) + "\n")
    path = directory / "model.safetensors"
    partial.replace(path)
    return path


def _eagle_config(head: Eagle3Head, dtype: torch.dtype) -> dict[str, Any]:
    config = head.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(text, "utf-8")
    partial.replace(path)
