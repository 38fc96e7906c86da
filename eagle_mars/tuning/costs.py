"""What one cycle costs on this device: the target's forward over n nodes with its verification, and the drafting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.proposer import Proposer
from eagle_mars.target import TargetModel
from eagle_mars.tree import DraftTree
from eagle_mars.tuning.replay import Recording
from eagle_mars.verify import plan, verify

Clock = Callable[[], float]
_NEW_ROWS = 2  # what a cycle usually adds to the head's rows


@dataclass(frozen=True)
class DraftCost:
    """Seconds of one beam width: the accepted rows and the first level, and each expansion after it."""

    first: float
    expansion: float

    def of(self, depth: int) -> float:
        """Seconds of a tree with `depth` expansions."""
        return self.first + depth * self.expansion


@torch.inference_mode()
def target_seconds(
    target: TargetModel, context: Tensor, sizes: Sequence[int], rounds: int = 5, clock: Clock = perf_counter
) -> dict[int, float]:
    """Median seconds of forward and verification by number of nodes, behind the prompt `context` [1, L].

    Sizes are interleaved round by round, so that a slow moment of the machine meets all of them. clock: seconds;
    `time.thread_time` counts those of a single thread's work on a busy machine.
    """
    cache = target.new_cache(1, context.shape[1] + max(sizes))
    target.prefill(context, cache, features=False)
    rules = plan(
        VerifyConfig(rule="exact"), SamplingConfig(), vocab_size=target.config.vocab_size, batch=1, device=target.device
    )
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    trees = {size: _star(context[:, -1:], size) for size in sizes}

    def cycle(tree: DraftTree) -> None:
        out = target.forward_tree(tree, cache)
        verify(tree, out.logits.to(target.device), rules, check=False).pack(tree).cpu()
        cache.commit([[]])

    for lap in range(rounds + 1):
        for size, tree in trees.items():
            spent = _seconds(lambda tree=tree: cycle(tree), target.device, clock)  # type: ignore[misc]
            if lap:  # the first one warms up
                seconds[size].append(spent)
    return {size: median(values) for size, values in seconds.items()}


@torch.inference_mode()
def draft_cost(
    head: Proposer, recording: Recording, depth: int, top_k: int, rounds: int = 5, clock: Clock = perf_counter
) -> DraftCost:
    """Medians behind the recorded prompt, from trees without and with `depth` expansions."""
    shallow, deep = (
        DraftConfig(depth=d, top_k=top_k, total_token=min(top_k + d * top_k**2, 3 * top_k) + 1) for d in (0, depth)
    )
    drafter = Drafter(head, deep)
    ids, first, start = recording.ids, head.first_row, recording.start
    features = recording.features

    def extend(begin: int, end: int) -> None:
        drafter.extend(None if features is None else features[:, begin - first : end - first], ids[:, begin:end])

    def grow(config: DraftConfig) -> None:
        drafter.config = config
        drafter.grow(ids[:, start])

    extend(first, start)
    device = ids.device
    times: list[tuple[float, float, float]] = []
    for lap in range(rounds + 1):
        at = start + _NEW_ROWS * lap
        if at + _NEW_ROWS > ids.shape[1]:
            break
        row = (
            _seconds(lambda at=at: extend(at, at + _NEW_ROWS), device, clock),  # type: ignore[misc]
            _seconds(lambda: grow(shallow), device, clock),
            _seconds(lambda: grow(deep), device, clock),
        )
        times.append(row)
    fed, least, most = (median(column) for column in zip(*times[1:], strict=True))
    return DraftCost(fed + least, max(most - least, 0.0) / depth)


def interpolated(seconds: Mapping[int, float], nodes: int) -> float:
    """Seconds of a size between measured ones."""
    return float(np.interp(nodes, list(seconds), list(seconds.values())))


def _star(root: Tensor, nodes: int) -> DraftTree:
    parents = torch.zeros(1, nodes, dtype=torch.long, device=root.device)
    parents[:, 0] = -1
    return DraftTree.from_parents(root.repeat(1, nodes), parents, max_depth=1)


def _seconds(work: Callable[[], None], device: torch.device, clock: Clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started
