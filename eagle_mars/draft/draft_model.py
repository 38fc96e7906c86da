"""A small language model as the drafter: classic speculative decoding, as a chain (top_k 1) or as a tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle_mars.causal_lm import CausalLM
from eagle_mars.draft.files import read_json, tensor_names
from eagle_mars.draft.layers import Start, write_rows
from eagle_mars.draft.proposer import KeyValue, Proposer
from eagle_mars.errors import CheckpointError


class DraftModel(Proposer):
    """Any Hugging Face causal LM that shares the target's tokenizer. It reads tokens only, no feature of the target.

    vocab_size: of the target's logits. Models of one tokenizer may pad their vocabularies differently: ids beyond the
    smaller one stand for no token, so none of them is proposed.
    Raises UnsupportedTargetError when the model can't draft a tree (the same reasons as for a target).
    """

    first_row = 0
    capture_layers = None

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        super().__init__()
        self._causal_lm = CausalLM(model)
        self.model = model
        self._shared_vocab = min(vocab_size, self._causal_lm.config.vocab_size)

    @property
    def draft_vocab_size(self) -> int:
        return self._shared_vocab

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: list[KeyValue], start: Start
    ) -> Tensor:
        lm = self._causal_lm
        tokens = tokens.clamp(max=lm.config.vocab_size - 1)
        positions = positions.clamp(max=lm.max_context - 1)  # a tree may reach beyond the last position
        rows: Any = _Rows(cache, start, tokens.shape[1] if mask is None else mask.shape[-1])
        return lm.run(lm.decoder, tokens, positions, mask, rows).last_hidden_state

    def logits(self, output: Tensor) -> Tensor:
        return self._causal_lm.lm_head(output)[..., : self._shared_vocab]

    def allocate(self, batch: int, capacity: int) -> list[KeyValue]:
        lm = self._causal_lm
        shape = (batch, lm.kv_heads, capacity, lm.head_dim)

        def empty(device: torch.device) -> Tensor:
            return torch.empty(shape, dtype=lm.dtype, device=device)

        return [(empty(device), empty(device)) for device in lm.layer_devices]


def holds_language_model(directory: Path) -> bool:
    """Whether a checkpoint is a whole language model rather than an EAGLE head, by the names of its tensors.

    config.json can't tell: heads carry their target's architecture there.
    """
    names = {name.removeprefix("model.") for name in tensor_names(directory)}
    is_head = bool({"fc.weight", "d2t"} & names)
    return not is_head and "model_type" in read_json(directory / "config.json") and "embed_tokens.weight" in names


def require_same_tokens(target: Any, draft: Any, path: str | Path) -> None:
    """Raise CheckpointError unless the tokenizers of target and draft model give every id the same token."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return
    example = next((token for token in ours if ours[token] != theirs.get(token)), None)
    example = example or next(token for token in theirs if token not in ours)
    raise CheckpointError(
        f"the draft model {path} has another vocabulary than the target ({len(theirs)} tokens against {len(ours)}; "
        f"{example!r} is {theirs.get(example)} there and {ours.get(example)} here): use a model of the same tokenizer."
    )


class _Rows(Cache):
    """The drafter's buffers as a cache of transformers: rows from `start` on are written, all before `end` are read."""

    def __init__(self, buffers: list[KeyValue], start: Start, end: int) -> None:
        super().__init__(layers=[_Layer(pair, start, end) for pair in buffers])


class _Layer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, pair: KeyValue, start: Start, end: int) -> None:
        super().__init__()
        self._keys, self._values = pair
        self._start, self._end = start, end
        self._seen = 0  # without a mask of ours, the model builds one for rows behind these: the prompt's first ones
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the drafter allocates."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        write_rows(self._keys, key_states, self._start)
        write_rows(self._values, value_states, self._start)
        self._seen = self._end
        return self._keys[:, :, : self._end], self._values[:, :, : self._end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._end, 0

    def get_seq_length(self) -> int:
        return self._seen

    def get_max_length(self) -> int:
        return self._keys.shape[2]

    get_max_cache_shape = get_max_length  # the name before transformers 5.1x
