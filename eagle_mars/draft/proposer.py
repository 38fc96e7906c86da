"""What the drafter asks of whatever proposes tokens: an EAGLE head of any family, or a whole language model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from eagle_mars.draft.layers import Start

KeyValue = tuple[Tensor, Tensor]


class Proposer(nn.Module, ABC):
    """Stateless: the key/value rows of a request belong to its `Drafter`, so requests may share a proposer.

    first_row: index of the first prompt token that has a row: 1 for a head, whose rows pair the target's feature of a
        position with the token after it, 0 for a language model.
    """

    first_row: int

    @property
    @abstractmethod
    def capture_layers(self) -> tuple[int, ...] | None:
        """Target layers that it takes features from, as `TargetModel` reads it; None: it takes no features."""

    @property
    @abstractmethod
    def draft_vocab_size(self) -> int:
        """Tokens that it can propose."""

    @abstractmethod
    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, feature_size] → the feature stream [B, T, H] that `forward` takes."""

    @abstractmethod
    def forward(
        self, x: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache: list[KeyValue], start: Start
    ) -> Tensor:
        """One pass over T rows → [B, T, H]: what `logits` takes, and the feature stream of the next level.

        x: [B, T, H] feature stream, of no width for who reads no features. tokens: [B, T] target ids. positions: [B, T]
        rotary positions. mask: [B, 1, T, rows to be read] bool, True is visible; None is causal, when start is 0.
        cache: one (keys, values) pair per layer; rows start to start + T of each sequence are written.
        """

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """`forward`'s output [B, T, H] → draft logits [B, T, draft_vocab_size]."""

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids in the draft vocabulary → target ids, same shape."""
        return draft_ids

    @abstractmethod
    def allocate(self, batch: int, capacity: int) -> list[KeyValue]:
        """Key/value buffers [B, kv_heads, capacity, head_dim] for each layer, in its dtype and on its device."""
