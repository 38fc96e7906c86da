"""Launches the kernels of `kernels.py`: three launches (two when every row is greedy), nothing read by the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from eagle_mars.sampling import Coins, History, cutoff, penalise, temper
from eagle_mars.tree import DraftTree
from eagle_mars.verify.kernels import accept_and_walk, final_draw, row_statistics
from eagle_mars.verify.plan import RowPlan
from eagle_mars.verify.verdict import Verdict

_BLOCK = 4096  # one program of the row statistics: 32 elements a thread with 4 warps, no spills


@dataclass(frozen=True)
class Launch:
    """Tile sizes. rows x block: tile of the row statistics. group: sequences per program of the other two.

    The interpreter's cost is per program, so tests batch rows and sequences, and shrink the block to get many splits.
    """

    rows: int = 1
    block: int = _BLOCK
    group: int = 1


@dataclass(frozen=True)
class Partials:
    """Statistics of each vocabulary split, [B, M, S]; `mass` holds nothing when every row is greedy.

    cut: [B, M, 1] lowest tempered logit that the warpers keep; any tensor when they keep all.
    """

    z1: Tensor
    t1: Tensor
    z2: Tensor
    t2: Tensor
    mass: Tensor
    cut: Tensor


def launch_statistics(logits: Tensor, plan: RowPlan, launch: Launch) -> Partials:
    """The first launch: reads the logits [B, M, V] once."""
    batch, nodes, vocab = logits.shape
    splits = triton.cdiv(vocab, launch.block)
    draws, cuts = plan.sampling.draws, plan.sampling.truncates
    cut = cutoff(temper(logits, plan.sampling), plan.sampling) if cuts else plan.sampling.temperature
    z1, z2, mass = (_empty(logits, batch, nodes, splits, dtype=torch.float32) for _ in range(3))
    t1, t2 = (_empty(logits, batch, nodes, splits, dtype=torch.int32) for _ in range(2))
    row_statistics[(triton.cdiv(batch * nodes, launch.rows), splits)](
        logits, plan.sampling.temperature, cut, z1, t1, z2, t2, mass,
        batch * nodes, nodes, vocab, splits, *logits.stride(),
        ROWS=launch.rows, BLOCK=launch.block, DRAWS=draws, CUT=cuts,
    )  # fmt: skip
    return Partials(z1, t1, z2, t2, mass, cut)


def verify_triton(
    tree: DraftTree,
    logits: Tensor,
    plan: RowPlan,
    coins: Coins | None = None,
    spent_regret: Tensor | None = None,
    history: History | None = None,
    launch: Launch | None = None,
) -> Verdict:
    """The same `Verdict` as `verify_reference`, for `exact` and the `mars*` rules."""
    with torch.cuda.device_of(logits):  # a launch goes to the current device, which a sharded model's last may not be
        return _verify(
            tree, penalise(logits, plan.sampling, history, tree), plan, coins, spent_regret, launch or Launch()
        )


def _verify(
    tree: DraftTree, logits: Tensor, plan: RowPlan, coins: Coins | None, spent_regret: Tensor | None, launch: Launch
) -> Verdict:
    partials = launch_statistics(logits, plan, launch)
    batch, nodes, vocab = logits.shape
    splits, strides, width = partials.z1.shape[-1], logits.stride(), tree.max_depth + 1
    draws, cuts = plan.sampling.draws, plan.sampling.truncates
    greedy, temperature = _bytes(plan.sampling.greedy), plan.sampling.temperature
    tokens, parents, depth, draft_logprob = (
        x.contiguous() for x in (tree.tokens, tree.parents, tree.depth, tree.draft_logprob)
    )
    path = _empty(logits, batch, width, dtype=torch.int64)
    relaxed = _empty(logits, batch, width, dtype=torch.bool)
    n_accepted, next_token, invalid, low_margin, rescued, nonpositive_top, last = (
        _empty(logits, batch, dtype=torch.int64) for _ in range(7)
    )
    regret = _empty(logits, batch, dtype=torch.float64)
    removed = _empty(logits, batch, nodes, dtype=torch.bool)
    padded = max(triton.next_power_of_2(nodes), 16)
    grid = (triton.cdiv(batch, launch.group),)
    accept_and_walk[grid](
        logits, tokens, parents, depth, _bytes(tree.ancestors), draft_logprob,
        draft_logprob if coins is None else coins.accept.contiguous(),  # without draws, coins are never read
        partials.z1, partials.t1, partials.z2, partials.t2, partials.mass, partials.cut,
        plan.rule, plan.theta, plan.gap, _bytes(plan.by_gap), _bytes(plan.longest), _bytes(plan.protected),
        plan.max_relaxed, plan.max_regret if spent_regret is None else plan.max_regret - spent_regret,
        _bytes(plan.released_ratio), _bytes(plan.draft_q), greedy, temperature,
        path, n_accepted, next_token, _bytes(relaxed), regret, invalid, low_margin, rescued, nonpositive_top,
        last, _bytes(removed),
        batch, nodes, vocab, splits, width, *strides,
        GROUP=launch.group, NODES=padded, WIDTH=triton.next_power_of_2(width), CHUNK=merge_chunk(splits, padded),
        DRAWS=draws, CUT=cuts, num_warps=walk_warps(padded),
    )  # fmt: skip
    if coins is not None and draws:
        final_draw[grid](
            logits, tokens, partials.z1, partials.mass, partials.cut, coins.draw.contiguous(), last, _bytes(removed),
            plan.rule, greedy, temperature, next_token,
            batch, nodes, vocab, splits, *strides,
            GROUP=launch.group, NODES=padded, SPLITS=triton.next_power_of_2(splits), BLOCK=launch.block, CUT=cuts,
            num_warps=8,
        )  # fmt: skip
    return Verdict(path, n_accepted, next_token, relaxed, regret, invalid, low_margin, rescued, nonpositive_top)


def _empty(like: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def walk_warps(nodes: int) -> int:
    """Warps of the walk: its pair tiles grow with the square of the nodes, and so would registers and compile time."""
    return min(max(nodes // 8, 4), 32)


def merge_chunk(splits: int, nodes: int) -> int:
    """Splits that are merged at once: a power of two, small enough for a few registers a thread."""
    return min(triton.next_power_of_2(splits), max(1024 // nodes, 8))


def _bytes(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)
