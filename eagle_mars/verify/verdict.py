"""What one verification decides, on the device and, after the cycle's single read, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from eagle_mars.errors import LogitsError
from eagle_mars.tree import DraftTree


class Fault(IntEnum):
    """Why a row's logits can't be verified; `NONE` is falsy."""

    NONE = 0
    NAN = 1
    NO_FINITE_TOP = 2


_CAUSES = {
    Fault.NAN: "contain NaN",
    Fault.NO_FINITE_TOP: "have no finite maximum (all -inf, or +inf)",
}

_SCALARS = ("n_accepted", "next_token", "regret", "invalid", "low_margin", "rescued", "nonpositive_top")


@dataclass(frozen=True)
class Verdict:
    """The accepted path of each row of the batch. Width D + 1, with D the tree's `max_depth`.

    path: [B, D+1] int64 node indices, root first, last accepted node at `n_accepted`, padded with -1.
    n_accepted: [B] int64, accepted drafts (the root not counted).
    next_token: [B] int64, the token that the target supplies after the path: the next root.
    relaxed: [B, D+1] bool, aligned with `path`: accepted by relaxation.
    regret: [B] float64 nats, sum of log p(top-1) - log p(accepted) at T = 1 over the relaxed nodes.
    invalid: [B] int64, a `Fault`; nothing else in such a row means anything.
    low_margin: [B] int64, nodes of the path with low margin (0 for rules that don't look at it).
    rescued: [B] int64, relaxed nodes where `exact` would have stopped.
    nonpositive_top: [B] int64, nodes of the path where z1 <= 0 kept the ratio from relaxing.
    """

    path: Tensor
    n_accepted: Tensor
    next_token: Tensor
    relaxed: Tensor
    regret: Tensor
    invalid: Tensor
    low_margin: Tensor
    rescued: Tensor
    nonpositive_top: Tensor

    def pack(self, tree: DraftTree) -> Tensor:
        """[B, K] float64 on the device: everything that the host needs, path tokens included, for one single read."""
        tokens = tree.tokens.gather(1, self.path.clamp(min=0))
        scalars = [getattr(self, name).double().unsqueeze(1) for name in _SCALARS]
        return torch.cat([*scalars, self.path.double(), tokens.double(), self.relaxed.double()], dim=1)

    def raise_if_invalid(self) -> None:
        """Raise `LogitsError` for the first row that can't be trusted. Reads the device."""
        for row, fault in enumerate(self.invalid.tolist()):
            _refuse(row, fault)


@dataclass(frozen=True)
class HostVerdict:
    """One row of a `Verdict` as plain Python values.

    tokens: accepted draft tokens. path: their node indices after the root's 0. relaxed: one flag per accepted token.
    The other fields are those of `Verdict`.
    """

    tokens: list[int]
    path: list[int]
    relaxed: list[bool]
    next_token: int
    regret: float
    invalid: Fault
    low_margin: int
    rescued: int
    nonpositive_top: int

    @property
    def decision(self) -> tuple[list[int], list[int], int, Fault]:
        """What processes that verify the same tree have to agree on."""
        return self.path, self.tokens, self.next_token, self.invalid

    def raise_if_invalid(self, row: int = 0) -> None:
        """Raise `LogitsError` if the logits of this row couldn't be verified."""
        _refuse(row, self.invalid)


def unpack(packed: Tensor, max_depth: int) -> list[HostVerdict]:
    """Inverse of `Verdict.pack` for a tensor that is already on the host: one `HostVerdict` per row."""
    width = max_depth + 1
    verdicts = []
    for values in packed.tolist():
        scalar = dict(zip(_SCALARS, values, strict=False))
        path, tokens, relaxed = (values[len(_SCALARS) + part * width :][:width] for part in range(3))
        stop = int(scalar["n_accepted"]) + 1
        verdicts.append(
            HostVerdict(
                tokens=[int(token) for token in tokens[1:stop]],
                path=[int(node) for node in path[:stop]],
                relaxed=[bool(flag) for flag in relaxed[1:stop]],
                next_token=int(scalar["next_token"]),
                regret=scalar["regret"],
                invalid=Fault(int(scalar["invalid"])),
                low_margin=int(scalar["low_margin"]),
                rescued=int(scalar["rescued"]),
                nonpositive_top=int(scalar["nonpositive_top"]),
            )
        )
    return verdicts


def _refuse(row: int, fault: int) -> None:
    if fault:
        raise LogitsError(
            f"The target's logits of row {row} {_CAUSES[Fault(fault)]}, so nothing may be accepted from them; "
            "check the checkpoint and try a wider dtype (float32)."
        )
