"""What a draft tree gains, predicted from how much of it is accepted and from what forwards cost.

    speed-up = tau x (a token of the target alone) / (drafting + forward over the tree)

tau, tokens per cycle, comes from one logged run with the whole candidate pool: its accepted paths tell what any smaller
or shallower tree of the same beam would have accepted. The times are measured on the device, or those of a GPU that
isn't there, from its bandwidth (`Roofline`). `python scripts/simulate.py check` compares predictions with runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

from eagle_mars.config import DraftConfig
from eagle_mars.memory import TargetSize
from eagle_mars.tree import DraftTree
from eagle_mars.verify import Verdict, verify
from evaluation.watch import walked


def pool(depth: int, top_k: int) -> DraftConfig:
    """The tree of all candidates: every smaller or shallower tree of this beam is a part of it."""
    return DraftConfig(total_token=1 + top_k + depth * top_k**2, depth=depth, top_k=top_k)


@dataclass
class Acceptance:
    """A verifier that lets `verify` decide and keeps how large a tree each accepted draft needed.

    needed: per cycle, for each accepted draft in order, the smallest `total_token` that holds it, by depth of the tree;
    a tree too shallow for it has none.
    """

    inner: Callable[..., Verdict] = verify
    needed: list[list[dict[int, int]]] = field(default_factory=list)

    def __call__(self, tree: DraftTree, logits: Tensor, *arguments: Any, **options: Any) -> Verdict:
        verdict = self.inner(tree, logits, *arguments, **options)
        if tree.nodes > 1:  # the last cycle of a response may not draft
            self.needed.append(sizes(tree, walked(verdict)[1:].tolist()))
        return verdict

    def tau(self, draft: DraftConfig) -> float:
        """Tokens per cycle of a tree with the beam that was logged.

        Cycles are taken as they began in the logged run; a smaller tree would begin some of them elsewhere.
        """
        return 1 + fmean(
            sum(sizes.get(draft.depth, draft.total_token + 1) <= draft.total_token for sizes in cycle)
            for cycle in self.needed
        )


def sizes(tree: DraftTree, path: list[int]) -> list[dict[int, int]]:
    """For each node of the path (root left out) depth of a tree → the nodes it must have to hold this one."""
    scores = (tree.ancestors[0].double() @ tree.draft_logprob[0].double().unsqueeze(1)).squeeze(1).tolist()
    level = tree.depth[0].tolist()
    found = []
    for node in path:
        better = [level[n] for n, s in enumerate(scores) if (-s, n) < (-scores[node], node)]
        depths = range(level[node] - 1, tree.max_depth)  # a tree of that `depth` has depth + 1 levels
        found.append({depth: 1 + sum(at <= depth + 1 for at in better) for depth in depths})
    return found


@dataclass(frozen=True)
class Clock:
    """Seconds of the parts of a cycle.

    alone: a token of the target alone. forward: over n nodes, verification included. first: feeding the head and its
    first level; expansion: each level more.
    """

    alone: float
    forward: Mapping[int, float]
    first: float
    expansion: float

    def cycle(self, draft: DraftConfig) -> float:
        """Seconds of one cycle; forwards between measured sizes are interpolated."""
        forward = float(np.interp(draft.total_token, list(self.forward), list(self.forward.values())))
        return self.first + draft.depth * self.expansion + forward

    def speedup(self, draft: DraftConfig, tau: float) -> float:
        """Over the target alone, prefill apart."""
        return tau * self.alone / self.cycle(draft)


@dataclass(frozen=True)
class Roofline:
    """A GPU in numbers, to estimate a `Clock` where nothing can be measured.

    bandwidth: bytes per second that a forward really gets. compute: operations per second likewise. launch: seconds per
    layer that don't depend on the work (kernel launches, and the all-reduces of tensor parallelism).
    """

    bandwidth: float
    compute: float
    launch: float

    def clock(
        self,
        target: TargetSize,
        head_parameters: int,
        context: int,
        sizes: tuple[int, ...] = (1, 8, 16, 32, 60, 100),
        *,
        number: int = 2,
        weight: float = 2,
        devices: int = 1,
    ) -> Clock:
        """number: bytes of activations, cache and head; weight: bytes of a weight of the target."""

        def forward(nodes: int) -> float:
            read = (target.met(nodes) * weight + context * target.row * number) / devices
            work = 2 * nodes * target.active / devices
            return max(read / self.bandwidth, work / self.compute) + target.layers * self.launch

        step = head_parameters * number / self.bandwidth + self.launch * 2
        return Clock(forward(1), {n: forward(n) for n in sizes}, step, step)
