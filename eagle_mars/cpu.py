"""Linear layers that cost hardly more for a handful of rows than for one, on a CPU.

A GPU verifies a small draft tree for the price of one token. Stock CPU matrix products don't: they lay the weight out
anew on every call, which doubles the price from the second row on. oneDNN can keep a weight in its own layout; the
price is the memory of a second copy. One row (plain decoding) and long prompts stay with the stock product.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle_mars.errors import ConfigError

_MAX_ROWS = 64  # beyond, laying the weight out anew is cheap against the product itself
_TYPICAL_ROWS = 8  # oneDNN picks its layout for about this many


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear` on the CPU and shares its parameters (so tied embeddings stay tied)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _TYPICAL_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows == 1 or rows > _MAX_ROWS:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def _layout_exists(dtype: torch.dtype) -> bool:
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _TYPICAL_ROWS)
    except RuntimeError:  # the only way to ask: what a processor can do depends on the build of oneDNN
        return False
    return True


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of `model` by a `PackedLinear`, in place; returns how many.

    Raises ConfigError when the model isn't on a CPU, or oneDNN is missing or can't lay out its dtype here.
    """
    if not torch.backends.mkldnn.is_available():
        raise ConfigError("this torch was built without oneDNN, so weights can't be packed; load without cpu_pack.")
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise ConfigError("cpu_pack is for models on the CPU; load without it, a GPU doesn't need it.")
    if not _layout_exists(next(model.parameters()).dtype):
        raise ConfigError(
            "oneDNN has no layout for half precision on this processor (it needs AVX-512); load with "
            "dtype=torch.float32 or without cpu_pack."
        )
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
