"""The target's key/value cache: preallocated, appended to by the model, compacted by the accepted path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from eagle_mars.errors import ContextLengthError, UnsupportedTargetError


@dataclass(frozen=True)
class CacheLayout:
    """What one row of the cache looks like: the same heads in every layer, each layer on its own device."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]  # one per layer


class TreeCache(Cache):
    """A `transformers.Cache` whose rows behind the committed ones are a draft tree until `commit` keeps a path of them.

    All layers of a device share one buffer [layers, 2, B, kv_heads, capacity, head_dim], so that compaction is one
    copy per device; `separate`, keys and values of each layer have one of their own, since compilers take what shares
    memory to overlap. The buffer grows geometrically up to `max_length` rows; lengths live on the host. Sequences may
    have different lengths: each one's rows start at 0, without gaps, and `tree_mask` hides what lies behind its own.

    lengths: committed rows of each sequence in use; `drop` and `join` change how many of the `batch` places are.
    """

    def __init__(
        self, layout: CacheLayout, batch: int, max_length: int, capacity: int = 256, separate: bool = False
    ) -> None:
        super().__init__(layers=[_TreeLayer(self, index) for index in range(len(layout.devices))])
        self.layout = layout
        self.batch = batch
        self.max_length = max_length
        self.lengths = [0] * batch
        self._pending = [0] * len(layout.devices)  # rows appended since the last commit, per layer
        self._columns: dict[tuple[int, int, torch.device], Tensor] = {}
        self._mask: Tensor | None = None
        self._masked_from = 0
        self._separate = separate
        self._buffers: list[Tensor] = []
        self._views: list[tuple[Tensor, Tensor]] = []
        self._allocate(min(capacity, max_length))

    @property
    def capacity(self) -> int:
        return self._views[0][0].shape[2]

    @property
    def committed(self) -> int:
        """Committed rows of the longest sequence."""
        return max(self.lengths, default=0)

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same length."""
        return len(set(self.lengths)) == 1

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows behind the committed ones, or refuse before anything is written.

        Raises ContextLengthError beyond `max_length`.
        """
        needed = self.committed + rows
        if needed > self.max_length:
            raise ContextLengthError(
                f"the cache holds at most {self.max_length} rows and this step needs {needed}; "
                "shorten the prompt, lower max_new_tokens or raise max_length."
            )
        if needed > self.capacity:
            self._allocate(min(2 * needed, self.max_length))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append rows [B, kv_heads, T, head_dim] to a layer, behind each sequence's own; returns all that it holds."""
        keys, values = self._views[layer_idx]
        start = self.committed + self._pending[layer_idx]
        rows = key_states.shape[2]
        end = start + rows
        if end > self.capacity:
            self.reserve(end - self.committed)
            keys, values = self._views[layer_idx]
        if key_states.shape[1::2] != keys.shape[1::2] or value_states.shape[1::2] != values.shape[1::2]:
            raise UnsupportedTargetError(
                f"layer {layer_idx} writes keys {tuple(key_states.shape)} and values {tuple(value_states.shape)}, but "
                f"its config promises {keys.shape[1]} heads of {keys.shape[3]}; such a target is not supported."
            )
        keys, values = keys[: len(self.lengths)], values[: len(self.lengths)]
        if self.uniform:
            keys[:, :, start:end] = key_states
            values[:, :, start:end] = value_states
        else:
            columns = self._columns_behind(self._pending[layer_idx], rows, keys.device)
            sequences = torch.arange(len(self.lengths), device=keys.device).unsqueeze(1)
            keys[sequences, :, columns] = key_states.transpose(1, 2)
            values[sequences, :, columns] = value_states.transpose(1, 2)
        self._pending[layer_idx] += rows
        return keys[:, :, :end], values[:, :, :end]

    @property
    def state(self) -> list[Tensor]:
        """Keys and values [B, kv_heads, capacity, head_dim] of each layer in turn, for who writes rows by itself."""
        return [tensor for pair in self._views for tensor in pair]

    def appended(self, rows: int) -> None:
        """Count rows that were written into `state` behind all others, in every layer."""
        self._pending = [pending + rows for pending in self._pending]

    def commit(self, paths: list[list[int]] | None = None) -> None:
        """Keep rows of what was appended since the last commit; None keeps all of it.

        paths: per sequence, row offsets in ascending order. Source and target rows may overlap ([0, 2, 5] is written
        to 0, 1, 2): the rows are gathered before any is written.
        """
        if paths is None:
            paths = [list(range(self._pending[0]))] * len(self.lengths)
        for row, path in enumerate(paths):  # sequences, not nodes: each has its own path
            start, keep = self.lengths[row], len(path)
            if path != list(range(keep)):
                for buffer in self._buffers:
                    source = torch.tensor(path, device=buffer.device) + start
                    rows = buffer[:, :, row]
                    rows[..., start : start + keep, :] = rows.index_select(-2, source)
            self.lengths[row] = start + keep
        self._forget_pending()

    def join(self, other: TreeCache) -> None:
        """Copy the only sequence of `other` into a free place, behind the sequences in use.

        Raises ContextLengthError, and changes nothing, if it is longer than `max_length`.
        """
        row, length = len(self.lengths), other.committed
        if row == self.batch:
            raise RuntimeError("every place of this cache is in use; drop a sequence first")
        self.reserve(max(length - self.committed, 0))
        self._move_in(row, other, 0, length)
        self.lengths.append(length)

    def drop(self, row: int) -> None:
        """Free the place of a sequence; the last one in use moves into it."""
        last = len(self.lengths) - 1
        if row != last:
            self._move_in(row, self, last, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._forget_pending()

    def _move_in(self, row: int, other: TreeCache, place: int, length: int) -> None:
        """Copy a sequence; zeros behind it, since it reads, masked, what the one before it has left: 0 * NaN is NaN."""
        for buffer, source in zip(self._buffers, other._buffers, strict=True):
            buffer[:, :, row, :, :length] = source[:, :, place, :, :length]
            buffer[:, :, row, :, length:] = 0

    def reset(self, sequences: int | None = None) -> None:
        """Forget every row and start again with that many sequences (None: `batch`); the memory is kept."""
        self.lengths = [0] * (self.batch if sequences is None else sequences)
        self._forget_pending()

    def positions(self, offsets: Tensor) -> Tensor:
        """offsets [B, T], counted from each sequence's first row that isn't committed → positions [B, T]."""
        if self.uniform:
            return self.committed + offsets
        return torch.tensor(self.lengths, device=offsets.device).unsqueeze(1) + offsets

    def tree_mask(self, ancestors: Tensor) -> Tensor:
        """ancestors [B, M, M] bool → [B, 1, M, committed + M] bool, True is visible: the prefix and the ancestors.

        With sequences of one length, a view into one buffer of which only the tree's columns change, so that no cycle
        does O(length) work here; valid until the next call.
        """
        batch, nodes, _ = ancestors.shape
        if not self.uniform:
            return self._ragged_mask(ancestors)
        mask = self._mask
        if mask is None or mask.shape[0] != batch or mask.shape[2] != nodes or mask.shape[3] < self.committed + nodes:
            mask = torch.ones(batch, 1, nodes, self.capacity + nodes, dtype=torch.bool, device=ancestors.device)
        else:
            mask[..., self._masked_from : self._masked_from + nodes] = True
        mask[..., self.committed : self.committed + nodes] = ancestors.unsqueeze(1)
        self._mask, self._masked_from = mask, self.committed
        return mask[..., : self.committed + nodes]

    def _ragged_mask(self, ancestors: Tensor) -> Tensor:
        batch, nodes, _ = ancestors.shape
        lengths = torch.tensor(self.lengths, device=ancestors.device).view(batch, 1, 1)
        seen = torch.arange(self.committed + nodes, device=ancestors.device) < lengths
        columns = self._columns_behind(0, nodes, ancestors.device).unsqueeze(1).expand(batch, nodes, nodes)
        return seen.expand(batch, nodes, -1).scatter(2, columns, ancestors).unsqueeze(1)

    def _columns_behind(self, pending: int, rows: int, device: torch.device) -> Tensor:
        """[B, rows] int64: where each sequence's next rows go. The same for all layers of a forward, so it is kept."""
        key = (pending, rows, device)
        if key not in self._columns:
            starts = torch.tensor(self.lengths, device=device).unsqueeze(1) + pending
            self._columns[key] = starts + torch.arange(rows, device=device)
        return self._columns[key]

    def _forget_pending(self) -> None:
        self._pending = [0] * len(self._pending)
        self._columns.clear()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.committed + self._pending[layer_idx]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.max_length

    def _allocate(self, capacity: int) -> None:
        layout = self.layout
        if self._separate:
            parts = [(device, 1, 1) for device in layout.devices for _ in ("keys", "values")]
        else:
            parts = [(device, layout.devices.count(device), 2) for device in dict.fromkeys(layout.devices)]
        buffers = []
        for device, layers, kinds in parts:
            shape = (layers, kinds, self.batch, layout.kv_heads, capacity, layout.head_dim)
            # Shorter sequences and CUDA graphs read, masked, what lies behind the rows: it must be finite, since
            # 0 * NaN is NaN.
            buffers.append(torch.zeros(shape, dtype=layout.dtype, device=device))
        kept = self.committed + max(self._pending)
        for new, old in zip(buffers, self._buffers, strict=False):  # the first time there is nothing to move
            new[..., :kept, :] = old[..., :kept, :]
        self._buffers = buffers
        # Layers in their order: those of a device follow one another in its buffer.
        of_device: dict[torch.device, list[Tensor]] = {}
        for (device, _, _), buffer in zip(parts, buffers, strict=True):
            of_device.setdefault(device, []).extend(buffer.flatten(0, 1))
        rows = {device: iter(tensors) for device, tensors in of_device.items()}
        self._views = [(next(rows[device]), next(rows[device])) for device in layout.devices]


class _TreeLayer(CacheLayerMixin):
    """What transformers' mask code asks of a layer; the rows themselves belong to the cache."""

    is_sliding = False

    def __init__(self, cache: TreeCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the cache allocates for all layers at once."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self._cache.update(key_states, value_states, self._index, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_seq_length(self._index) + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length(self._index)

    def get_max_length(self) -> int:
        return self._cache.max_length

    get_max_cache_shape = get_max_length  # the name before transformers 5.1x
