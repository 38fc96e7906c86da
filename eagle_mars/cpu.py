"""Linear layers that cost hardly more for a handful of rows than for one, on a CPU.

A GPU verifies a small draft tree for the price of one token. Stock CPU matrix products don't: they lay the weight out
anew on every call, which doubles the price from the second row on. Two libraries inside torch keep a weight laid out;
the price is the memory of a second copy. Long prompts stay with the stock product.

`float32`, oneDNN: the same weights. One row (plain decoding) stays with the stock product too.
`float16`, FBGEMM: the weights are rounded to half precision, products and sums stay in single precision. Decoding waits
for weights from memory, so half of the bytes is nearly half of the time, and up to six rows cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle_mars.errors import ConfigError

PackedWeights = Literal["float32", "float16"]

_MAX_ROWS = 64  # beyond, laying the weight out anew is cheap against the product itself
_TYPICAL_ROWS = 8  # oneDNN picks its layout for about this many


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` on the CPU and shares its parameters (so tied embeddings stay tied).

    weights: "float16" rounds the shared weight itself, so that every product of the model sees the same numbers.
    """

    def __init__(self, linear: nn.Linear, weights: PackedWeights = "float32") -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._fewest_rows = 2 if weights == "float32" else 1
        self._multiply = (_onednn if weights == "float32" else _fbgemm)(linear)
        # A tensor, so that all layers of a model share one compiled graph, which takes it as an input.
        number = next(_numbers)
        self.register_buffer("number", torch.tensor(number), persistent=False)
        _packed[number] = self

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            product: Tensor = torch.ops.eagle_mars.packed_linear(x, self.number, self.out_features)
            return product
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        rows = x.numel() // self.in_features
        if not self._fewest_rows <= rows <= _MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        return self._multiply(x)


# Compilers know neither library's layout, so what they see is one operator that looks the layer up.
_numbers = count()
_packed: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_operators = torch.library.Library("eagle_mars", "DEF")
_operators.define("packed_linear(Tensor x, Tensor number, int out_features) -> Tensor")


def _look_up_and_multiply(x: Tensor, number: Tensor, out_features: int) -> Tensor:
    return _packed[int(number)].multiply(x)


def _shape_of_product(x: Tensor, number: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_operators.impl("packed_linear", _look_up_and_multiply, "CPU")
torch.library.register_fake("eagle_mars::packed_linear", _shape_of_product, lib=_operators)


def _onednn(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    bias = linear.bias
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _fbgemm(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight = linear.weight.detach()
    weight.copy_(weight.half())
    packed = torch.ops.quantized.linear_prepack_fp16(weight, linear.bias)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def pack_linears(model: nn.Module, weights: PackedWeights = "float32") -> int:
    """Replace every `nn.Linear` of `model` by a `PackedLinear`, in place; returns how many.

    Raises ConfigError when the model isn't on a CPU, its weights don't fit into half precision (for "float16"), or the
    library is missing or can't lay out its dtype here.
    """
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ConfigError("cpu_pack is for models on the CPU; load without it, a GPU doesn't need it.")
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    dtype = next(model.parameters()).dtype
    if weights == "float16":
        _require_half(dtype, [child.weight for _, _, child in found])
    else:
        _require_layout(dtype)
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, weights))
    return len(found)


def _require_layout(dtype: torch.dtype) -> None:
    if not torch.backends.mkldnn.is_available():
        raise ConfigError("this torch was built without oneDNN, so weights can't be packed; load without cpu_pack.")
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _TYPICAL_ROWS)
    except RuntimeError:  # the only way to ask: what a processor can do depends on the build of oneDNN
        raise ConfigError(
            "oneDNN has no layout for half precision on this processor (it needs AVX-512); load with "
            "dtype=torch.float32 or without cpu_pack."
        ) from None


def _require_half(dtype: torch.dtype, weights: Sequence[Tensor]) -> None:
    if dtype != torch.float32:
        raise ConfigError(
            f'cpu_pack="float16" computes in single precision, but the model is {dtype}; load it with '
            "dtype=torch.float32."
        )
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise ConfigError('this torch was built without FBGEMM; load with cpu_pack="float32".')
    limit = torch.finfo(torch.float16).max
    if any(weight.abs().max() > limit for weight in weights):
        raise ConfigError(f'the model has weights beyond ±{limit:.0f}; load it with cpu_pack="float32".')
