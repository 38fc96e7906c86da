"""The target: any Hugging Face causal LM whose attention takes a 4-D mask, used as it is."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_mars.cache import CacheLayout, TreeCache
from eagle_mars.errors import ContextLengthError, UnsupportedTargetError
from eagle_mars.tree import DraftTree


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, rows, V] in the model's dtype. features: [B, rows, F], F = taps x hidden size; None if not asked."""

    logits: Tensor
    features: Tensor | None


class TargetModel:
    """Adapter of an unmodified `AutoModelForCausalLM`.

    capture_layers: decoder layers whose inputs are concatenated to the draft head's features, in this order
    (EAGLE_SPEC 1.4); empty: the state after the final norm (EAGLE-1/2).
    Nothing stays on the model between calls: the taps are hooks that live as long as one forward.
    Raises UnsupportedTargetError, with the reason, when a tree can't be verified on this model.
    """

    def __init__(self, model: PreTrainedModel, capture_layers: tuple[int, ...] = ()) -> None:
        refuse_unfit(model)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.decoder: nn.Module = model.get_decoder()
        self.layers: nn.ModuleList = self.decoder.layers
        self.capture_layers = capture_layers
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the keyword in 5.1x; `past_key_values` may survive there as a deprecated alias.
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._wants_bool_mask = self.config._attn_implementation == "sdpa"

    @property
    def device(self) -> torch.device:
        """Where token ids go in: the device of the embedding."""
        return next(self.embed_tokens.parameters()).device

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

    def new_cache(self, batch: int, max_length: int) -> TreeCache:
        """A cache for `batch` sequences of at most `max_length` rows, draft trees included."""
        config = self.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        devices = tuple(next(layer.parameters()).device for layer in self.layers)
        return TreeCache(CacheLayout(kv_heads, head_dim, self.dtype, devices), batch, max_length)

    def prefill(self, ids: Tensor, cache: TreeCache, *, features: bool = True, chunk: int = 4096) -> TargetOutput:
        """Feed the prompt; logits of its last position only ([B, 1, V]), features of every position.

        ids: [B, L]. chunk: rows per forward, which bounds the memory of long prompts.
        """
        length = ids.shape[1]
        parts: list[Tensor] = []
        for start in range(0, length, chunk):
            piece = ids[:, start : start + chunk]
            positions = torch.arange(start, start + piece.shape[1], device=ids.device).expand_as(piece)
            mask = None  # causal from the start is what the model does by itself, with its fastest kernel
            if start:
                seen = torch.arange(start + piece.shape[1], device=ids.device)
                mask = (seen <= positions.unsqueeze(-1)).unsqueeze(1)
            out = self._forward(piece, positions, mask, cache, features, logits_to_keep=1)
            cache.commit()
            if out.features is not None:
                parts.append(out.features)
        return TargetOutput(out.logits, torch.cat(parts, dim=1) if features else None)

    def forward_tree(self, tree: DraftTree, cache: TreeCache) -> TargetOutput:
        """One forward over all nodes: logits [B, M, V] and features [B, M, F]. The cache holds M uncommitted rows."""
        positions = cache.committed + tree.depth
        # Nodes beyond the last position can't be part of the answer (max_new_tokens ends before them), but a table of
        # positions must not be read behind its end.
        positions = positions.clamp(max=self.max_context - 1)
        cache.reserve(tree.nodes)
        return self._forward(tree.tokens, positions, cache.tree_mask(tree.ancestors), cache, True, logits_to_keep=0)

    def step(self, ids: Tensor, cache: TreeCache) -> Tensor:
        """Plain autoregression: ids [B, 1] → logits [B, 1, V]; the row is committed."""
        positions = torch.full_like(ids, cache.committed)
        out = self._forward(ids, positions, None, cache, False, logits_to_keep=0)
        cache.commit()
        return out.logits

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache, features: bool, logits_to_keep: int
    ) -> TargetOutput:
        cache.reserve(ids.shape[1])
        if mask is not None and not self._wants_bool_mask:  # eager attention adds its mask
            additive = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
            mask = additive.masked_fill_(~mask, torch.finfo(self.dtype).min)
        taps: dict[int, Tensor] = {}
        with torch.inference_mode(), self._tapped(taps if features else None):
            out = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **{self._cache_keyword: cache},
            )
        if not features:
            return TargetOutput(out.logits, None)
        device = out.logits.device
        return TargetOutput(out.logits, torch.cat([taps[key].to(device) for key in sorted(taps)], dim=-1))

    @contextmanager
    def _tapped(self, taps: dict[int, Tensor] | None) -> Iterator[None]:
        """Collect the features of one forward into `taps`."""
        if taps is None:
            yield
            return

        def keep_input(index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taps[index] = args[0] if args else kwargs["hidden_states"]

        def keep_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            taps[0] = output[0]

        if self.capture_layers:
            handles = [
                self.layers[i].register_forward_pre_hook(partial(keep_input, i), with_kwargs=True)
                for i in self.capture_layers
            ]
        else:
            handles = [self.decoder.register_forward_hook(keep_output)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


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
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        return "parts of it are offloaded, so they have no device; use a smaller dtype or more devices"
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


def check_context(target: TargetModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ContextLengthError unless the prompt and the answer fit into the target's positions."""
    limit = target.max_context
    if prompt_tokens >= limit:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens but the target's context is {limit}; shorten the prompt."
        )
    if prompt_tokens + max_new_tokens > limit:
        raise ContextLengthError(
            f"prompt ({prompt_tokens} tokens) + max_new_tokens ({max_new_tokens}) is more than the target's context of "
            f"{limit}; lower max_new_tokens to {limit - prompt_tokens} or shorten the prompt."
        )
