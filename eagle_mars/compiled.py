"""Forwards without Python between their operators: compiled by inductor on a CPU, replayed from a CUDA graph on a GPU.

On a CPU the unit is a decoder layer: all layers of a model share its code, so the compiler is done in seconds, and how
many rows of the cache there are is a symbol in it. A CUDA graph records a whole forward and has no symbols. There the
rows that are read are rounded up, behind the mask, and each step of `_STEP` rows has a graph of its own. Both need
writes to rows that a tensor names (`FixedRows`).

What can't be compiled runs as before, and the log says why: compiled or not, an answer is the same up to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

logger = logging.getLogger(__name__)

Function = Callable[..., tuple[Tensor, ...]]
Run = Callable[[Sequence[Tensor], Sequence[Tensor]], Any]

_STEP = 256  # rows by which a CUDA graph's view of the cache grows
_WARM_UPS = 2  # before a capture, so that libraries have allocated what they keep


class Compiled:
    """A function with a fast form that may turn out impossible: then it runs as it is, and the log says why.

    function: takes tensors: inputs, and behind them a state that it writes into. run: the fast form; takes the inputs
    and the state as two sequences. name: what the log calls it.
    """

    def __init__(self, function: Function, run: Run, name: str) -> None:
        self._function, self._run, self._name = function, run, name
        self.failed = False

    def __call__(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Any:
        if not self.failed:
            try:
                return self._run(inputs, state)
            except Exception as error:  # noqa: BLE001 - dynamo, inductor, the C++ compiler, CUDA: each has its own types
                self.failed = True
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                logger.warning("%s can't be compiled and runs as it is: %s", self._name, reason)
        return self._function(*inputs, *state)


class Inductor:
    """A function compiled for its shapes; dimension 2 of the state and some of the inputs' may change.

    growing: number of an input → its dimension that changes from call to call.
    """

    def __init__(self, function: Function, growing: Mapping[int, int]) -> None:
        self._compiled, self._growing = torch.compile(function), growing

    def __call__(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Any:
        for number, dimension in self._growing.items():
            torch._dynamo.mark_dynamic(inputs[number], dimension)
        for tensor in state:
            torch._dynamo.mark_dynamic(tensor, 2)
        return self._compiled(*inputs, *state)


class Graphs:
    """A function recorded as CUDA graphs: one per shapes of its inputs, for as long as the state lies where it is."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._graphs: dict[tuple[torch.Size, ...], _Graph] = {}
        self._state_at: tuple[int, ...] = ()

    def __call__(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> Any:
        addresses = tuple(tensor.data_ptr() for tensor in state)
        if addresses != self._state_at:  # another response, or its cache has grown
            self._graphs.clear()
            self._state_at = addresses
        shapes = tuple(tensor.shape for tensor in inputs)
        if shapes not in self._graphs:
            self._graphs[shapes] = _Graph(self._function, inputs, state)
        return self._graphs[shapes](inputs)


class CompiledLayers:
    """The decoder layers of a model on a CPU, for forwards that write fixed rows of one sequence.

    cache_keyword: the argument of a layer that takes the cache.
    """

    def __init__(self, layers: nn.ModuleList, cache_keyword: str) -> None:
        self._layers, self._cache_keyword = layers, cache_keyword
        self._forward = torch.compile(_layer_forward)

    @contextmanager
    def in_place(self, state: Sequence[Tensor], columns: Tensor) -> Iterator[None]:
        """Within it the layers run compiled, on keys and values `state` (see `FixedRows`); nothing stays behind."""
        for index, layer in enumerate(self._layers):
            keys, values = state[2 * index : 2 * index + 2]
            for tensor in (keys, values):
                torch._dynamo.mark_dynamic(tensor, 2)
            layer.forward = partial(self._run, layer, keys, values, columns)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _run(
        self, layer: nn.Module, keys: Tensor, values: Tensor, columns: Tensor, hidden: Tensor, **options: Any
    ) -> Any:
        options.pop(self._cache_keyword, None)
        torch._dynamo.mark_dynamic(options["attention_mask"], 3)
        return self._forward(layer, self._cache_keyword, keys, values, columns, hidden, options)


def _layer_forward(
    layer: nn.Module,
    cache_keyword: str,
    keys: Tensor,
    values: Tensor,
    columns: Tensor,
    hidden: Tensor,
    options: dict[str, Any],
) -> Any:
    """What is compiled, once for all layers: a layer's number is never looked at, or each would have its own code."""
    cache = _LayerRows(keys, values, columns, options["attention_mask"].shape[-1])
    return type(layer).forward(layer, hidden, **{cache_keyword: cache}, **options)


class _LayerRows:
    """The cache as one layer sees it."""

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor, end: int) -> None:
        self.keys, self.values, self.columns, self.end = keys, values, columns, end

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.columns, key_states)
        self.values.index_copy_(2, self.columns, value_states)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end]


class _Graph:
    """One capture: inputs are copied to where it reads them, outputs lie where it left them until the next replay."""

    def __init__(self, function: Function, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                function(*self._inputs, *state)
        torch.cuda.current_stream().wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = function(*self._inputs, *state)

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._outputs


def read_rows(needed: int, capacity: int, device: torch.device) -> int:
    """Rows of the cache that a forward reads when `needed` of them are written: a CUDA graph's are rounded up."""
    return min(-(-needed // _STEP) * _STEP, capacity) if device.type == "cuda" else needed


class FixedRows(Cache):
    """Key/value buffers as a forward sees them that writes rows named by a tensor and reads so many.

    state: keys and values [B, kv_heads, capacity, d] of each layer in turn. columns: [T] int64. end: rows to read.
    """

    def __init__(self, state: Sequence[Tensor], columns: Tensor, end: int) -> None:
        super().__init__(layers=[_FixedLayer(end) for _ in state[::2]])
        self._rows = [_LayerRows(*pair, columns, end) for pair in zip(state[::2], state[1::2], strict=True)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._rows[layer_idx].update(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions and mask are given, so nobody computes them from this


class _FixedLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, end: int) -> None:
        super().__init__()
        self._end = end
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the rows are there."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("the cache updates all layers itself")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._end, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._end

    get_max_cache_shape = get_max_length  # the name before transformers 5.1x
