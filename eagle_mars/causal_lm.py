"""What target and draft model share: any Hugging Face causal LM whose attention takes a 4-D mask, used as it is."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from eagle_mars.attention import packed_queries
from eagle_mars.errors import UnsupportedTargetError


class CausalLM:
    """An unmodified `AutoModelForCausalLM` and the arguments of one forward with explicit positions and mask.

    Raises UnsupportedTargetError, with the reason, when a draft tree can't be fed to this model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        refuse_unfit(model)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.decoder: nn.Module = model.get_decoder()
        self.layers: nn.ModuleList = self.decoder.layers
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the keyword in 5.1x; `past_key_values` may survive there as a deprecated alias.
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._wants_bool_mask = self.config._attn_implementation == "sdpa"

    @property
    def device(self) -> torch.device:
        """Where token ids go in: the device of the embedding."""
        return where_it_runs(self.embed_tokens)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def embed_tokens(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def max_context(self) -> int:
        """Positions that the model was made for (`max_position_embeddings`)."""
        return int(self.config.max_position_embeddings)

    @property
    def tensor_parallel(self) -> int:
        """Processes that the model is spread over, a slice of every layer in each."""
        return tensor_parallel(self.model)

    @property
    def kv_heads(self) -> int:
        """Key/value heads in this process."""
        return _kv_heads(self.config) // self.tensor_parallel

    @property
    def query_groups(self) -> int:
        """Query heads that share a key/value head."""
        return self.config.num_attention_heads // _kv_heads(self.config)

    @property
    def head_dim(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        return tuple(where_it_runs(layer) for layer in self.layers)

    def run(
        self, module: nn.Module, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache, **options: Any
    ) -> Any:
        """One forward of `module`, the model or its decoder; options: further keywords for it.

        ids, positions: [B, T]. mask: [B, 1, T, rows] bool, True is visible; None is causal from the first row.
        """
        packs = mask is not None and self._wants_bool_mask and self.query_groups > 1
        with packed_queries(self.config) if packs else nullcontext():
            return module(**self._arguments(ids, positions, mask, cache), **options)

    def _arguments(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> dict[str, Any]:
        if mask is not None and not self._wants_bool_mask:  # eager attention adds its mask
            additive = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
            mask = additive.masked_fill_(~mask, torch.finfo(self.dtype).min)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": True,
            self._cache_keyword: cache,
        }


def where_it_runs(module: nn.Module) -> torch.device:
    """The device that `module` computes on; accelerate keeps offloaded weights elsewhere until they are needed."""
    for part in module.modules():
        device = getattr(_hook(part), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(module.parameters()).device


def _hook(module: nn.Module) -> Any:
    """accelerate's hook that places a module's weights; of a sequence of hooks, the one that does."""
    hook = getattr(module, "_hf_hook", None)
    return next((h for h in getattr(hook, "hooks", ()) if hasattr(h, "execution_device")), hook)


def _is_hollow(module: nn.Module) -> bool:
    """Whether weights of its own are on the meta device, and nothing would load them."""
    hollow = any(parameter.device.type == "meta" for parameter in module.parameters(recurse=False))
    return hollow and not getattr(_hook(module), "offload", False)


def tensor_parallel(model: PreTrainedModel) -> int:
    """Processes that transformers has spread `model` over; 1 when this one has all of it."""
    return getattr(model, "tp_size", None) or 1


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def refuse_unfit(model: PreTrainedModel) -> None:
    """Raise UnsupportedTargetError with the reason if a draft tree can't be verified on `model`."""
    name = type(model).__name__
    config = model.config.get_text_config()
    reason = _why_unfit(model, config)
    if reason:
        raise UnsupportedTargetError(f"{name} can't be a target: {reason}.")


def _why_unfit(model: PreTrainedModel, config: Any) -> str | None:
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder; use a decoder-only causal LM"
    if any(_is_hollow(module) for module in model.modules()):
        return "parts of it have no weights (they are on the meta device); load it with from_pretrained"
    if _kv_heads(config) % tensor_parallel(model):
        return f"its {_kv_heads(config)} key/value heads can't be spread evenly over {tensor_parallel(model)} processes"
    if model.get_output_embeddings() is None:
        return "it has no language-model head; load it with AutoModelForCausalLM"
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in kinds:
        return "its attention works in chunks, which a tree would cross"
    if getattr(model, "_is_stateful", False) or kinds - {"full_attention", "sliding_attention"}:
        return "it has recurrent or linear-attention layers, whose state can't follow the branches of a tree"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    windowed = not kinds or "sliding_attention" in kinds
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return "its config has no max_position_embeddings, so its context length is unknown"
    if window is not None and windowed and window < limit:
        return (
            f"its attention uses a sliding window of {window} tokens; "
            "load it with sliding_window=None if the checkpoint allows full attention"
        )
    decoder = model.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        return "its decoder has no `layers` to take features from"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "its forward takes no position_ids, so tree nodes can't be placed"
    if config._attn_implementation not in ("sdpa", "eager"):
        return (
            f'its attention "{config._attn_implementation}" takes no 4-D mask; load it with attn_implementation="sdpa"'
        )
    return None
