"""The choice: tokens per second of every tree shape, predicted from its acceptance and its costs.

EAGLE's automatic `total_token` times the target alone and keeps fixed guesses of what more nodes accept (EAGLE_SPEC
4.1). Here both sides are measured, on greedy answers of this target, so the choice is for `exact` at temperature 0; a
relaxed rule accepts more of every tree, which favours the same shapes or slightly deeper ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from eagle_mars.config import DraftConfig, VerifyConfig
from eagle_mars.draft.proposer import Proposer
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.target import TargetModel
from eagle_mars.tuning.costs import draft_cost, interpolated, target_seconds
from eagle_mars.tuning.replay import Needed, Recording, replay, tau

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write the beginning of a story about a lighthouse keeper.",
    "List the steps of baking bread at home.",
)


@dataclass(frozen=True)
class Grid:
    """Shapes that are tried. nodes: sizes; depth: expansions at most; top_k: beam widths."""

    nodes: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 26, 32, 40, 50, 60)
    depth: int = 6
    top_k: tuple[int, ...] = (1, 2, 4, 6, 10)


class Candidate(BaseModel):
    """One tree. tau: tokens per cycle. draft_ms, target_ms: of a cycle. tokens_per_second: predicted, prefill apart."""

    model_config = ConfigDict(frozen=True)

    total_token: int
    depth: int
    top_k: int
    tau: float
    draft_ms: float
    target_ms: float
    tokens_per_second: float

    @property
    def draft(self) -> DraftConfig:
        return DraftConfig(total_token=self.total_token, depth=self.depth, top_k=self.top_k)


class Tuning(BaseModel):
    """candidates: best first, the best one of each size. plain_tokens_per_second: of the target alone."""

    model_config = ConfigDict(frozen=True)

    candidates: tuple[Candidate, ...]
    plain_tokens_per_second: float

    @property
    def best(self) -> Candidate:
        return self.candidates[0]


def tune(
    target: TargetModel,
    head: Proposer,
    prompts: Sequence[Tensor],
    *,
    stop_ids: Collection[int] = (),
    max_new_tokens: int = 48,
    grid: Grid | None = None,
) -> Tuning:
    """Measure and rank. prompts: token ids [1, L]. Takes about a minute for a small model on two CPU cores.

    Raises ConfigError when the answers are too short to tell anything.
    """
    grid = grid or Grid()
    recordings = [_record(target, head, prompt, stop_ids, max_new_tokens) for prompt in prompts]
    recordings = [r for r in recordings if r.ids.shape[1] - r.start > grid.depth + 1]
    if not recordings:
        raise ConfigError(
            f"no answer to the tuning prompts is longer than {grid.depth + 1} tokens, so nothing can be measured; "
            "give prompts with longer answers."
        )
    seconds = target_seconds(target, recordings[0].ids, (1, *grid.nodes))
    found = []
    for top_k in grid.top_k:
        if top_k > head.draft_vocab_size:
            continue
        cost = draft_cost(head, recordings[0], grid.depth, top_k)
        replays = [replay(head, recording, grid.depth, top_k) for recording in recordings]
        for depth in range(grid.depth + 1):
            for nodes in grid.nodes:
                if top_k > nodes - 1 or nodes - 1 > top_k + depth * top_k**2 or nodes <= depth + 1:
                    continue
                shape = DraftConfig(total_token=nodes, depth=depth, top_k=top_k)
                found.append(_candidate(shape, replays, cost.of(depth), interpolated(seconds, nodes)))
    found.sort(key=lambda c: (-c.tokens_per_second, c.total_token, c.depth, c.top_k))
    best_of_size = {c.total_token: c for c in reversed(found)}
    ranked = sorted(best_of_size.values(), key=lambda c: -c.tokens_per_second)
    return Tuning(candidates=tuple(ranked), plain_tokens_per_second=1 / seconds[1])


def _candidate(shape: DraftConfig, replays: Sequence[list[Needed]], draft: float, target: float) -> Candidate:
    lengths = fmean(tau(positions, shape.depth, shape.total_token) for positions in replays)
    return Candidate(
        **shape.model_dump(),
        tau=lengths,
        draft_ms=1000 * draft,
        target_ms=1000 * target,
        tokens_per_second=lengths / (draft + target),
    )


@torch.inference_mode()
def _record(target: TargetModel, head: Proposer, prompt: Tensor, stop_ids: Collection[int], limit: int) -> Recording:
    prompt = prompt.to(target.device)
    request = Request(max_new_tokens=limit, verify=VerifyConfig(rule="exact"), stop_ids=frozenset(stop_ids))
    answer = [token for step in Engine(target).autoregress(prompt, request) for token in step.tokens]
    ids = torch.cat((prompt, torch.tensor([answer], device=target.device)), dim=1)
    out = target.prefill(ids, target.new_cache(1, ids.shape[1]), features=head.capture_layers is not None)
    return Recording(ids, out.features, prompt.shape[1])
