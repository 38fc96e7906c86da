"""Soft cross-entropy against the target's distribution over the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _SoftCrossEntropy(torch.autograd.Function):
    """Gradient formed in the forward pass, in the buffer of the softmax: the [N, Dv] arrays are what costs here."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor) -> Tensor:
        log_q = logits.log_softmax(-1, dtype=probabilities.dtype)
        loss = -(probabilities * log_q).sum(-1)
        ctx.dtype = logits.dtype
        ctx.save_for_backward(log_q.exp_().sub_(probabilities))
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference.mul_(grads[0].unsqueeze(-1)).to(ctx.dtype), None  # nobody goes back through it twice


def soft_cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """logits and probabilities [N, Dv], the latter summing to 1 -> nats [N] in their dtype.

    Differentiable in ``logits`` only, once.
    """
    return _SoftCrossEntropy.apply(logits, probabilities)
