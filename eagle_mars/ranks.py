"""The processes of a tensor-parallel target, and what keeps them together.

Each process holds a slice of the target, and the whole draft head; each drafts, tosses coins, verifies and commits by
itself. They sum what their slices give in every layer, so they must all feed the same tokens: one that decides
otherwise would mix two sequences in every number that follows. That can happen (other hardware, other versions, other
options), and a collective operation would not notice.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor

from eagle_mars.errors import ConfigError, RanksError


class Ranks:
    """All processes of the default group; every method is collective: each of them has to call it.

    device: of the target's slice, where the group's backend wants its tensors. size: processes that share the target.
    Raises ConfigError if others were started beside them: a group of groups isn't supported.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        if size != dist.get_world_size():
            raise ConfigError(
                f"{dist.get_world_size()} processes were started for a target that {size} of them share; start {size}."
            )
        self.device = device
        self.size = size

    def require_same(self, what: str, *facts: object) -> None:
        """Raise RanksError, in every process, unless `facts` have the same `repr` in all of them; tensors, as lists.

        what: names them in the message. One reduction of two numbers, whatever the facts are.
        """
        plain = [fact.tolist() if isinstance(fact, Tensor) else fact for fact in facts]
        digest = int.from_bytes(blake2b(repr(plain).encode(), digest_size=7).digest())
        extremes = torch.tensor([digest, -digest], device=self.device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        highest, lowest = extremes.tolist()
        if highest != -lowest:
            raise RanksError(
                f"the {self.size} processes of this target differ in {what}; give all of them the same prompts, "
                "options and seed, on the same hardware and versions."
            )

    def of_the_first(self, number: int) -> int:
        """The `number` of process 0, below 2**63."""
        shared = torch.tensor([number], device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared)
