"""A whole tiny pair on disk: target, byte-level tokenizer with a chat template, EAGLE-3 head in EAGLE's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import tiny_head, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(path: Path) -> int:
    """Write a byte-level tokenizer; returns its vocabulary size."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=special[1:], chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    return len(fast)


def save_head(path: Path, model, draft_ids: torch.Tensor | None = None) -> None:
    """Write a random EAGLE-3 head for `model`, over `draft_ids` or else over its whole vocabulary."""
    path.mkdir(parents=True, exist_ok=True)
    head = tiny_head(model, draft_ids=draft_ids)
    sizes = head.config
    raw = {
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        "rms_norm_eps": sizes.rms_norm_eps,
    }
    (path / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, path / "model.safetensors")


def save_pair(directory: Path) -> tuple[str, str]:
    """Returns the paths of target and head."""
    target, head = directory / "target", directory / "head"
    vocab = save_tokenizer(target)
    model = tiny_model("Llama", vocab_size=vocab)
    # Only sixteen letters get logits, and the head drafts among them: drafts hit often enough to test something.
    letters = torch.arange(65, 81)
    silent = torch.ones(vocab, dtype=torch.bool)
    silent[letters] = False
    with torch.no_grad():
        model.lm_head.weight[silent] = 0
    model.save_pretrained(target)
    save_head(head, model, draft_ids=letters)
    return str(target), str(head)
