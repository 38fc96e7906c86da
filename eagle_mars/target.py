"""The target: any Hugging Face causal LM whose attention takes a 4-D mask, used as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_mars.cache import CacheLayout, TreeCache
from eagle_mars.causal_lm import CausalLM
from eagle_mars.errors import ConfigError, ContextLengthError
from eagle_mars.ranks import Ranks
from eagle_mars.tree import DraftTree

PREFILL_CHUNK = 2048
# A piece behind the first needs a mask of its rows, for every query head of a group, by all before it. Of long prompts
# the pieces are shorter, so that the mask has this many elements at most; below 256 rows a forward is mostly overhead.
_MASK_ELEMENTS = 1 << 26
_SMALLEST_CHUNK = 256


@dataclass(frozen=True)
class TargetOutput:
    """logits: [B, rows, V] in the model's dtype. features: [B, rows, F], F = taps x hidden size; None if not asked."""

    logits: Tensor
    features: Tensor | None


class TargetModel(CausalLM):
    """Adapter of an unmodified `AutoModelForCausalLM`.

    capture_layers: decoder layers whose inputs are concatenated to the draft head's features, in this order
    (EAGLE_SPEC 1.4); empty: the state after the final norm (EAGLE-1/2); None: no features, a draft model reads none.
    prefill_chunk: prompt rows per forward at most.
    ranks: the processes that share a tensor-parallel model; None when this one has all of it.
    Nothing stays on the model between calls: the taps are hooks that live as long as one forward.
    Raises UnsupportedTargetError, with the reason, when a tree can't be verified on this model; ConfigError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capture_layers: tuple[int, ...] | None = (),
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> None:
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk={prefill_chunk} feeds nothing; use 1 or more rows, {PREFILL_CHUNK} say.")
        super().__init__(model)
        self.capture_layers = capture_layers
        self.prefill_chunk = prefill_chunk
        self.ranks = Ranks(self.device, self.tensor_parallel) if self.tensor_parallel > 1 else None

    def require_same(self, what: str, *facts: object) -> None:
        """Raise RanksError unless all processes of a tensor-parallel model come with the same; nothing with one."""
        if self.ranks is not None:
            self.ranks.require_same(what, *facts)

    def new_cache(self, batch: int, max_length: int) -> TreeCache:
        """A cache for `batch` sequences of at most `max_length` rows, draft trees included."""
        return TreeCache(CacheLayout(self.kv_heads, self.head_dim, self.dtype, self.layer_devices), batch, max_length)

    def prefill(self, ids: Tensor, cache: TreeCache, *, features: bool = True) -> TargetOutput:
        """Feed the prompt ids [B, L]; logits of its last position only ([B, 1, V]), features of every position."""
        outputs = list(self.prefill_chunks(ids, cache, features=features))
        kept = [out.features for out in outputs if out.features is not None]
        return TargetOutput(outputs[-1].logits, torch.cat(kept, dim=1) if kept else None)

    def prefill_chunks(self, ids: Tensor, cache: TreeCache, *, features: bool = True) -> Iterator[TargetOutput]:
        """Feed the prompt ids [B, L] in pieces of `prefill_chunk` rows at most, so that its memory has a bound.

        Yields, when a piece is committed, its features and the logits of its last position ([B, 1, V]).
        """
        length = ids.shape[1]
        cache.reserve(length)
        features = features and self.capture_layers is not None
        rows = chunk_rows(length, self.query_groups, self.prefill_chunk)
        for start in range(0, length, rows):
            piece = ids[:, start : start + rows]
            positions = torch.arange(start, start + piece.shape[1], device=ids.device).expand_as(piece)
            mask = None  # causal from the start is what the model does by itself, with its fastest kernel
            if start:
                seen = torch.arange(start + piece.shape[1], device=ids.device)
                mask = (seen <= positions.unsqueeze(-1)).unsqueeze(1)
            out = self._forward(piece, positions, mask, cache, features, logits_to_keep=1)
            cache.commit()
            yield out

    def forward_tree(self, tree: DraftTree, cache: TreeCache, *, features: bool = True) -> TargetOutput:
        """One forward over all nodes: logits [B, M, V], features [B, M, F] or None. It leaves M uncommitted rows."""
        self.require_same("what they drafted", tree.tokens, tree.parents)  # else a row would mix two nodes
        positions = cache.positions(tree.depth)
        # Nodes beyond the last position can't be part of the answer (max_new_tokens ends before them), but a table of
        # positions must not be read behind its end.
        positions = positions.clamp(max=self.max_context - 1)
        cache.reserve(tree.nodes)
        features = features and self.capture_layers is not None
        return self._forward(tree.tokens, positions, cache.tree_mask(tree.ancestors), cache, features, logits_to_keep=0)

    def step(self, ids: Tensor, cache: TreeCache) -> Tensor:
        """Plain autoregression: ids [B, 1] → logits [B, 1, V]; the row is committed. Sequences of one length only."""
        positions = cache.positions(torch.zeros_like(ids))
        out = self._forward(ids, positions, None, cache, False, logits_to_keep=0)
        cache.commit()
        return out.logits

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache, features: bool, logits_to_keep: int
    ) -> TargetOutput:
        cache.reserve(ids.shape[1])
        taps: dict[int, Tensor] = {}
        with torch.inference_mode(), self._tapped(taps if features else None):
            out = self.run(self.model, ids, positions, mask, cache, logits_to_keep=logits_to_keep)
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


def chunk_rows(length: int, query_groups: int, most: int) -> int:
    """Rows per forward of a prompt of that length, `most` at most; query_groups: query heads per key/value head."""
    return min(most, max(_SMALLEST_CHUNK, _MASK_ELEMENTS // (query_groups * length)))


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
