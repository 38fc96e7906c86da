"""The target: any Hugging Face causal LM whose attention takes a 4-D mask, used as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from eagle_mars.attention import packed_queries
from eagle_mars.cache import CacheLayout, TreeCache
from eagle_mars.causal_lm import CausalLM
from eagle_mars.compiled import Compiled, CompiledLayers, FixedRows, Function, Graphs, read_rows
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
    compiled: whether the forwards of single sequences over trees and tokens are compiled (`eagle_mars.compiled`).
    ranks: the processes that share a tensor-parallel model; None when this one has all of it.
    Nothing stays on the model between calls: the taps are hooks that live as long as one forward.
    Raises UnsupportedTargetError, with the reason, when a tree can't be verified on this model; ConfigError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        capture_layers: tuple[int, ...] | None = (),
        prefill_chunk: int = PREFILL_CHUNK,
        compiled: bool = False,
    ) -> None:
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk={prefill_chunk} feeds nothing; use 1 or more rows, {PREFILL_CHUNK} say.")
        super().__init__(model)
        self.capture_layers = capture_layers
        self.prefill_chunk = prefill_chunk
        self.ranks = Ranks(self.device, self.tensor_parallel) if self.tensor_parallel > 1 else None
        self._taps: dict[int, Tensor] = {}
        self._keepers = [self._keeper(index) for index in self.capture_layers or ()]
        self.compiled = compiled
        if compiled:
            self._require_compilable()
            self._compiled_layers = CompiledLayers(self.layers, self._cache_keyword)
            self._with_features = self._fast(self._fixed_features)
            self._without = self._fast(self._fixed_logits)

    def require_same(self, what: str, *facts: object) -> None:
        """Raise RanksError unless all processes of a tensor-parallel model come with the same; nothing with one."""
        if self.ranks is not None:
            self.ranks.require_same(what, *facts)

    def new_cache(self, batch: int, max_length: int) -> TreeCache:
        """A cache for `batch` sequences of at most `max_length` rows, draft trees included."""
        layout = CacheLayout(self.kv_heads, self.head_dim, self.dtype, self.layer_devices)
        return TreeCache(layout, batch, max_length, separate=self.compiled)

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
        mask = cache.tree_mask(tree.ancestors)
        if self.compiled and tree.batch == 1 and tree.nodes > 1:  # a bare root comes once per answer
            return self._fixed_forward(tree.tokens, positions, mask, cache, features)
        return self._forward(tree.tokens, positions, mask, cache, features, logits_to_keep=0)

    def step(self, ids: Tensor, cache: TreeCache) -> Tensor:
        """Plain autoregression: ids [B, 1] → logits [B, 1, V]; the row is committed. Sequences of one length only."""
        positions = cache.positions(torch.zeros_like(ids))
        if self.compiled and ids.shape[0] == 1:
            cache.reserve(1)
            mask = torch.ones(1, 1, 1, cache.committed + 1, dtype=torch.bool, device=ids.device)
            out = self._fixed_forward(ids, positions, mask, cache, False)
        else:
            out = self._forward(ids, positions, None, cache, False, logits_to_keep=0)
        cache.commit()
        return out.logits

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: TreeCache, features: bool, logits_to_keep: int
    ) -> TargetOutput:
        cache.reserve(ids.shape[1])
        with torch.inference_mode(), self._tapped(features):
            out = self.run(self.model, ids, positions, mask, cache, logits_to_keep=logits_to_keep)
            return TargetOutput(out.logits, self._tapped_features(out.logits.device) if features else None)

    def _fixed_forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor, cache: TreeCache, features: bool
    ) -> TargetOutput:
        """`_forward` of one sequence, compiled."""
        rows = ids.shape[1]
        cache.reserve(rows)
        end = read_rows(cache.committed + rows, cache.capacity, ids.device)
        mask = F.pad(mask, (0, end - mask.shape[-1]))  # and contiguous: its strides are part of what is compiled
        columns = torch.arange(cache.committed, cache.committed + rows, device=ids.device)
        run = self._with_features if features else self._without
        with torch.inference_mode(), self._tapped(features), packed_queries(self.config):
            logits, *rest = run((ids, positions, mask, columns), cache.state)
        cache.appended(rows)
        return TargetOutput(logits, rest[0] if rest else None)

    def _fast(self, function: Function) -> Compiled:
        def in_layers(inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Any:
            with self._compiled_layers.in_place(state, columns=inputs[-1]):
                return function(*inputs, *state)

        return Compiled(function, Graphs(function) if self.device.type == "cuda" else in_layers, "the target's forward")

    def _fixed_features(self, ids: Tensor, positions: Tensor, mask: Tensor, columns: Tensor, *state: Tensor) -> Any:
        """What is compiled: the tensors of `_fixed_forward` → logits and features."""
        (logits,) = self._fixed_logits(ids, positions, mask, columns, *state)
        return logits, self._tapped_features(logits.device)

    def _fixed_logits(self, ids: Tensor, positions: Tensor, mask: Tensor, columns: Tensor, *state: Tensor) -> Any:
        cache = FixedRows(state, columns, mask.shape[-1])
        return (self.model(**self._arguments(ids, positions, mask, cache)).logits,)

    def _require_compilable(self) -> None:
        if self.ranks is not None:
            raise ConfigError("compile knows no tensor parallelism; leave one of them out.")
        if len(set(self.layer_devices)) > 1 or any(hasattr(module, "_hf_hook") for module in self.model.modules()):
            raise ConfigError("compile needs the whole target on one device; load it without offload or a device map.")
        if not self._wants_bool_mask:
            raise ConfigError('compile needs attn_implementation="sdpa"; load the target with it.')

    def _keeper(self, index: int) -> Any:
        def keep_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._taps[index] = args[0] if args else kwargs["hidden_states"]

        return keep_input

    def _keep_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._taps[0] = output[0]

    def _tapped_features(self, device: torch.device) -> Tensor:
        return torch.cat([self._taps[key].to(device) for key in sorted(self._taps)], dim=-1)

    @contextmanager
    def _tapped(self, features: bool) -> Iterator[None]:
        """Collect what the features of one forward are made of."""
        if not features:
            yield
            return
        if self.capture_layers:
            handles = [
                self.layers[i].register_forward_pre_hook(keeper, with_kwargs=True)
                for i, keeper in zip(self.capture_layers, self._keepers, strict=True)
            ]
        else:
            handles = [self.decoder.register_forward_hook(self._keep_output)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._taps.clear()


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
