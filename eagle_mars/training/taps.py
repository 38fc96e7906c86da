"""The target states that a head is trained on: three mid-stream features and the final hidden state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from eagle_mars.draft.infer import capture_layers


@contextmanager
def tapped(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """While open, each forward leaves the tapped layer inputs [B, T, H] in the yielded dict, keyed by layer."""
    layers = model.get_decoder().layers
    inputs: dict[int, Tensor] = {}

    def keep(index: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            inputs[index] = args[0] if args else kwargs["hidden_states"]

        return hook

    handles = [layers[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in capture_layers({}, len(layers))]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def fused(inputs: dict[int, Tensor]) -> Tensor:
    """Tapped inputs in increasing layer order on the last axis: [B, T, 3H]."""
    return torch.cat([inputs[i] for i in sorted(inputs)], dim=-1)
