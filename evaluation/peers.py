"""What transformers itself offers on the same weights: greedy `generate`, prompt lookup, assisted generation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle_mars.result import GenerationResult, Provenance


def hf_generate(
    model: PreTrainedModel, tokenizer: Any, prompt: Sequence[int], limit: int, name: str, **options: Any
) -> GenerationResult:
    """The greedy answer of `model.generate(**options)`; all of its time counts as decoding.

    options: `prompt_lookup_num_tokens`, `assistant_model`, `cache_implementation`, ...
    """
    started = perf_counter()
    ids = torch.tensor([list(prompt)], device=model.device)
    generating: Any = model  # its type hints hide `generate`
    out = generating.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit, **options
    )
    seconds = perf_counter() - started
    new = tuple(out[0, ids.shape[1] :].tolist())
    text = tokenizer.decode(new, skip_special_tokens=True)
    source: Provenance = "target"
    return GenerationResult(
        prompt_tokens=ids.shape[1],
        token_ids=new,
        provenance=(source,) * len(new),
        text=text,
        pieces=((text, source),),
        finish_reason="length" if len(new) == limit else "stop",
        accepted_lengths=(),
        regret=0.0,
        low_margin=0,
        rescued=0,
        nonpositive_top=0,
        prefill_seconds=0.0,
        decode_seconds=seconds,
        rule=name,
    )


def shallow(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """An assistant for `model` out of its own parts: the first half of `layers` and the last, weights shared.

    The middle of a deep model can be left out with the least harm (ShortGPT, arXiv 2403.03853).
    """
    decoder: Any = model.get_decoder()
    total = len(decoder.layers)
    kept = [*range((layers + 1) // 2), *range(total - layers // 2, total)]
    made: Any = type(model)(_shorter(model.config, layers))  # transformers wraps `to`, and its type is lost
    assistant: PreTrainedModel = made.to(model.dtype).eval()
    state = model.state_dict()
    renamed = {}
    for name, tensor in state.items():
        before, found, after = name.partition(".layers.")
        if found:
            index, _, rest = after.partition(".")
            if int(index) not in kept:
                continue
            name = f"{before}.layers.{kept.index(int(index))}.{rest}"
        renamed[name] = tensor
    assistant.load_state_dict(renamed, assign=True)
    assistant.tie_weights()
    generating: Any = assistant
    generating.generation_config = copy.deepcopy(model.generation_config)
    return assistant


def _shorter(config: Any, layers: int) -> Any:
    shorter = copy.deepcopy(config)
    shorter.num_hidden_layers = layers
    if getattr(shorter, "layer_types", None):
        shorter.layer_types = shorter.layer_types[:layers]
    return shorter
