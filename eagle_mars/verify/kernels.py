"""Triton kernels of verification: row statistics, accept and walk, final draw. Host side: `triton_backend.py`.

`reference.py` is the definition; discrete results are equal to its, not close. Logits are read once, in their own
dtype, and upcast in registers; a draw reads a block or two more. Addresses are int64, since B * M * V exceeds int32.

Partial results lie as [B, M, S] with S vocabulary splits. A NaN anywhere in a split becomes its z1, because hardware
maxima drop NaN. Splits without a finite logit have mass 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_TOKEN = tl.constexpr(2147483647)
EXACT = tl.constexpr(0)
MARS = tl.constexpr(1)
MARS_PAPER = tl.constexpr(2)
MARS_RELEASED = tl.constexpr(3)
FAULT_NAN = tl.constexpr(1)
FAULT_NO_FINITE_TOP = tl.constexpr(2)


@triton.jit
def row_statistics(
    logits, temperature, cut, z1_out, t1_out, z2_out, t2_out, mass_out,
    rows, nodes, vocab, splits, stride_b, stride_m, stride_v,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DRAWS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Grid (rows / ROWS, splits): the two best logits of a split and the sum of exp(w - w1) of its kept tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    live = row < rows
    batch = row // nodes
    token = split * BLOCK + tl.arange(0, BLOCK)
    inside = live[:, None] & (token < vocab)[None, :]
    address = (batch * stride_b + (row % nodes) * stride_m)[:, None] + token.to(tl.int64)[None, :] * stride_v
    z = tl.load(logits + address, mask=inside, other=float("-inf")).to(tl.float32)

    nan = tl.max((z != z).to(tl.int32), axis=1) > 0
    z = tl.where(z != z, float("-inf"), z)
    z1 = tl.max(z, axis=1)
    t1 = tl.min(tl.where(z == z1[:, None], token[None, :], NO_TOKEN), axis=1)
    others = tl.where(token[None, :] == t1[:, None], float("-inf"), z)
    z2 = tl.max(others, axis=1)
    t2 = tl.min(tl.where(others == z2[:, None], token[None, :], NO_TOKEN), axis=1)

    out = row * splits + split
    tl.store(z1_out + out, tl.where(nan, float("nan"), z1), mask=live)
    tl.store(t1_out + out, t1, mask=live)
    tl.store(z2_out + out, z2, mask=live)
    tl.store(t2_out + out, t2, mask=live)
    if DRAWS:
        t = tl.load(temperature + batch, mask=live, other=1.0)
        w = tl.div_rn(z, t[:, None])
        kept = z > float("-inf")
        if CUT:
            kept = kept & (w >= tl.load(cut + row, mask=live, other=0.0)[:, None])
        mass = tl.where(kept, tl.exp(w - tl.div_rn(z1, t)[:, None]), 0.0)
        tl.store(mass_out + out, tl.sum(mass, axis=1), mask=live)


@triton.jit
def _merge_splits(
    z1_in, t1_in, z2_in, t2_in, mass_in, row, live, splits, t,
    GROUP: tl.constexpr, NODES: tl.constexpr, CHUNK: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Statistics of whole rows [GROUP, NODES]: z1, t1, z2, t2, sum of exp(w - w1), and whether a NaN was seen."""
    z1 = tl.full([GROUP, NODES], float("-inf"), tl.float32)
    z2 = tl.full([GROUP, NODES], float("-inf"), tl.float32)
    t1 = tl.full([GROUP, NODES], NO_TOKEN, tl.int32)
    t2 = tl.full([GROUP, NODES], NO_TOKEN, tl.int32)
    mass = tl.full([GROUP, NODES], 0.0, tl.float32)
    nan = tl.full([GROUP, NODES], 0, tl.int32)
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)[None, None, :]
        at = row[:, :, None] * splits + split
        inside = live[:, :, None] & (split < splits)
        a1 = tl.load(z1_in + at, mask=inside, other=float("-inf"))
        i1 = tl.load(t1_in + at, mask=inside, other=NO_TOKEN)
        a2 = tl.load(z2_in + at, mask=inside, other=float("-inf"))
        i2 = tl.load(t2_in + at, mask=inside, other=NO_TOKEN)
        nan = tl.maximum(nan, tl.max((a1 != a1).to(tl.int32), axis=2))
        a1 = tl.where(a1 != a1, float("-inf"), a1)

        best = tl.max(a1, axis=2)
        best_id = tl.min(tl.where(a1 == best[:, :, None], i1, NO_TOKEN), axis=2)
        rest = tl.where(i1 == best_id[:, :, None], float("-inf"), a1)
        second = tl.maximum(tl.max(rest, axis=2), tl.max(a2, axis=2))
        second_id = tl.minimum(
            tl.min(tl.where(rest == second[:, :, None], i1, NO_TOKEN), axis=2),
            tl.min(tl.where(a2 == second[:, :, None], i2, NO_TOKEN), axis=2),
        )

        wins = (best > z1) | ((best == z1) & (best_id < t1))
        loser, loser_id = tl.where(wins, z1, best), tl.where(wins, t1, best_id)
        runner, runner_id = tl.where(wins, second, z2), tl.where(wins, second_id, t2)
        old = z1
        z1, t1 = tl.where(wins, best, z1), tl.where(wins, best_id, t1)
        keeps = (loser > runner) | ((loser == runner) & (loser_id < runner_id))
        z2, t2 = tl.where(keeps, loser, runner), tl.where(keeps, loser_id, runner_id)
        if DRAWS:
            share = tl.load(mass_in + at, mask=inside, other=0.0)
            w1 = tl.div_rn(z1, t)
            grown = tl.where(share > 0, share * tl.exp(tl.div_rn(a1, t[:, :, None]) - w1[:, :, None]), 0.0)
            shrunk = tl.where(mass > 0, mass * tl.exp(tl.div_rn(old, t) - w1), 0.0)
            mass = shrunk + tl.sum(grown, axis=2)
    t2 = tl.where(z2 == float("-inf"), t1, t2)
    return z1, t1, z2, t2, mass, nan > 0


@triton.jit
def _any(mask, flag):
    """[G, N, N] mask, [G, N] flag -> [G, N]: some column that the mask selects has the flag."""
    return tl.max((mask & flag[:, None, :]).to(tl.int32), axis=2) > 0


@triton.jit
def _low_margin(z1, z2, theta, gap, by_gap):
    wide1, wide2 = z1.to(tl.float64), z2.to(tl.float64)  # as the reference: a threshold met exactly doesn't relax
    ratio = (wide1 > 0) & (wide2 > theta * wide1)
    return tl.where(by_gap, wide1 - wide2 < gap, ratio)


@triton.jit
def accept_and_walk(
    logits, tokens, parents, depth, ancestors, draft_logprob, coins,
    z1_in, t1_in, z2_in, t2_in, mass_in, cut,
    rule_in, theta_in, gap_in, by_gap_in, longest_in, protected, max_relaxed_in, budget_in,
    released_ratio_in, draft_q_in, greedy_in, temperature_in,
    path_out, accepted_out, next_out, relaxed_out, regret_out, invalid_out, low_out, rescued_out, nonpositive_out,
    last_out, removed_out,
    batch, nodes, vocab, splits, width, stride_b, stride_m, stride_v,
    GROUP: tl.constexpr, NODES: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    DRAWS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Grid (B / GROUP,): which candidates are acceptable, the path, and everything in the verdict but a drawn token.

    Tiles are [GROUP, NODES] and, over pairs of nodes, [GROUP, NODES, NODES]: entry (g, i, j) speaks of j as seen by i.
    """
    b = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    here = b < batch
    row = b[:, None]
    node = tl.arange(0, NODES)[None, :]
    live = here[:, None] & (node < nodes)
    at = row * nodes + node
    parent = tl.load(parents + at, mask=live, other=-1).to(tl.int32)
    token = tl.load(tokens + at, mask=live, other=0).to(tl.int32)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    level = tl.load(depth + at, mask=live, other=0).to(tl.int32)
    child = parent >= 0
    parent_at = row * nodes + tl.maximum(parent, 0)

    rule = tl.load(rule_in + b, mask=here, other=EXACT)[:, None]
    theta = tl.load(theta_in + b, mask=here, other=0.0)[:, None]
    gap = tl.load(gap_in + b, mask=here, other=0.0)[:, None]
    by_gap = tl.load(by_gap_in + b, mask=here, other=0)[:, None] != 0
    greedy = tl.load(greedy_in + b, mask=here, other=1)[:, None] != 0
    t = tl.load(temperature_in + b, mask=here, other=1.0)[:, None]
    z1, t1, z2, _, _, nan = _merge_splits(
        z1_in, t1_in, z2_in, t2_in, mass_in, at, live, splits, t, GROUP, NODES, CHUNK, False
    )
    top1, top1_id, top2, top2_id, mass, _ = _merge_splits(
        z1_in, t1_in, z2_in, t2_in, mass_in, parent_at, child, splits, t, GROUP, NODES, CHUNK, DRAWS
    )
    z_at = row * stride_b + tl.maximum(parent, 0).to(tl.int64) * stride_m + token.to(tl.int64) * stride_v
    z = tl.load(logits + z_at, mask=child, other=float("-inf")).to(tl.float32)

    i, j = tl.arange(0, NODES)[None, :, None], tl.arange(0, NODES)[None, None, :]
    siblings = (parent[:, :, None] == parent[:, None, :]) & child[:, :, None]
    earlier = siblings & (j < i)
    repeats = earlier & (token[:, :, None] == token[:, None, :])
    valid = child & ~(tl.max(repeats.to(tl.int32), axis=2) > 0)
    is_top1 = valid & (token == top1_id)
    is_top2 = valid & (token == top2_id) & ~is_top1
    has_mass = z > float("-inf")
    exact = is_top1
    by_ratio = child & False
    released = (rule == MARS_RELEASED) & ~greedy
    deterministic = greedy | (rule == MARS_PAPER)
    if DRAWS:
        w = tl.div_rn(z, t)
        w1, w2 = tl.div_rn(top1, t), tl.div_rn(top2, t)
        if CUT:
            lowest = tl.load(cut + parent_at, mask=child, other=0.0)
            has_mass = has_mass & (w >= lowest)
            w2 = tl.where(w2 >= lowest, w2, float("-inf"))
        p = tl.where(has_mass, tl.exp(w - w1) / mass, 0.0)
        before = tl.sum(tl.where(earlier & valid[:, None, :], p[:, None, :], 0.0), axis=2)
        q = tl.maximum(tl.exp(tl.load(draft_logprob + at, mask=live, other=0.0)), 1e-10)
        divides = tl.load(draft_q_in + b, mask=here, other=0)[:, None] != 0
        q = tl.where(released & divides, q, 1.0)
        u = tl.load(coins + at, mask=live, other=1.0)
        below = valid & (u * tl.maximum(1.0 - before, 0.0) < p / q)
        by_coin = below & ~_any(earlier, below)
        exact = tl.where(deterministic, is_top1, by_coin)
        ratio = w2.to(tl.float64) / (w1.to(tl.float64) + 1e-10)
        follows = tl.load(released_ratio_in + b, mask=here, other=0)[:, None] != 0
        by_ratio = child & released & follows & (ratio > theta) & (vocab > 1)
        exact = exact & ~by_ratio

    beside_exact = _any(siblings, exact)
    either = is_top1 | is_top2
    shield1 = tl.load(protected + row * vocab + top1_id, mask=child, other=0) != 0
    shield2 = tl.load(protected + row * vocab + top2_id, mask=child, other=0) != 0
    by_margin = tl.where(deterministic, is_top2, either & ~beside_exact) & (has_mass | greedy)
    by_margin = by_margin & _low_margin(top1, top2, theta, gap, by_gap) & ~(shield1 | shield2)
    in_top2 = either & has_mass
    first_in_top2 = in_top2 & ~_any(earlier, in_top2) & by_ratio
    relaxed = tl.where(rule == MARS_RELEASED, first_in_top2, by_margin & (rule != EXACT))

    theirs, own = z[:, None, :], z[:, :, None]
    better = (theirs > own) | ((theirs == own) & (token[:, None, :] < token[:, :, None]))
    beaten = _any(siblings & better, relaxed)
    longest = tl.load(longest_in + b, mask=here, other=0)[:, None] != 0
    relaxed = relaxed & (longest | ~(beside_exact | beaten))

    line = tl.load(ancestors + at[:, :, None] * nodes + j, mask=live[:, :, None] & (j < nodes), other=0) != 0
    regret = tl.where(relaxed, top1 - z, 0.0)
    count = tl.sum((line & relaxed[:, None, :]).to(tl.int32), axis=2)
    spent = tl.sum(tl.where(line & (i != j), regret[:, None, :], 0.0), axis=2)
    total = spent + regret
    budget = tl.load(budget_in + b, mask=here, other=0.0)[:, None]
    most = tl.load(max_relaxed_in + b, mask=here, other=0)[:, None]
    refused = live & (node > 0) & ~(exact | (relaxed & (spent < budget) & (total <= budget) & (count <= most)))
    rank = tl.where(live & ~_any(line, refused), level * (nodes + 1) + nodes - count, -1)
    best = rank == tl.max(rank, axis=1)[:, None]
    least = tl.min(tl.where(best, total, float("inf")), axis=1)[:, None]
    last = tl.min(tl.where(best & (total == least), node, NODES), axis=1)

    on_path = tl.load(ancestors + (b * nodes + last)[:, None] * nodes + node, mask=live, other=0) != 0
    relaxed = relaxed & on_path
    step = tl.arange(0, WIDTH)[None, None, :]
    at_step = on_path[:, :, None] & (level[:, :, None] == step)
    out = row * width + tl.arange(0, WIDTH)[None, :]
    inside = here[:, None] & (tl.arange(0, WIDTH)[None, :] < width)
    tl.store(path_out + out, tl.max(tl.where(at_step, node[:, :, None], -1), axis=1).to(tl.int64), inside)
    tl.store(relaxed_out + out, tl.max((at_step & relaxed[:, :, None]).to(tl.int32), axis=1).to(tl.int8), inside)
    tl.store(accepted_out + b, tl.sum(on_path.to(tl.int64), axis=1) - 1, here)
    tl.store(next_out + b, tl.sum(tl.where(node == last[:, None], t1, 0), axis=1).to(tl.int64), here)
    tl.store(regret_out + b, tl.sum(tl.where(relaxed, regret, 0.0), axis=1).to(tl.float64), here)

    real = live & (child | (node == 0))
    has_nan = tl.max((real & nan).to(tl.int32), axis=1) > 0
    infinite = tl.max((real & ((z1 == float("inf")) | (z1 == float("-inf")))).to(tl.int32), axis=1) > 0
    fault = tl.where(has_nan, FAULT_NAN, tl.where(infinite, FAULT_NO_FINITE_TOP, 0))
    tl.store(invalid_out + b, fault.to(tl.int64), here)
    looks = on_path & (rule != EXACT)
    low = looks & _low_margin(z1, z2, theta, gap, by_gap)
    tl.store(low_out + b, tl.sum(low.to(tl.int64), axis=1), here)
    tl.store(nonpositive_out + b, tl.sum((looks & (z1 <= 0) & ~by_gap).to(tl.int64), axis=1), here)
    tl.store(rescued_out + b, tl.sum((relaxed & ~beside_exact).to(tl.int64), axis=1), here)
    if DRAWS:
        gone = (parent == last[:, None]) & valid & ~by_ratio & (rule != MARS_PAPER)
        tl.store(removed_out + at, gone.to(tl.int8), live)
        tl.store(last_out + b, last.to(tl.int64), here)


@triton.jit
def _split_mass(
    logits, tokens, removed, row_at, b, split, inside, removes, nodes, vocab, stride_v, t, w1, lowest,
    BLOCK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """[GROUP, BLOCK] float64: exp(w - w1) of one split's kept tokens per sequence; 0 for removed ones if `removes`."""
    column = split[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    address = row_at[:, None] + column.to(tl.int64) * stride_v
    z = tl.load(logits + address, mask=inside[:, None] & (column < vocab), other=float("-inf"))
    w = tl.div_rn(z.to(tl.float32), t[:, None])
    kept = w > float("-inf")
    if CUT:
        kept = kept & (w >= lowest[:, None])
    for node in range(0, nodes):
        gone = tl.load(removed + b * nodes + node, mask=removes, other=0) != 0
        token = tl.load(tokens + b * nodes + node, mask=removes, other=0)
        kept = kept & ~(gone[:, None] & (column == token[:, None]))
    return tl.where(kept, tl.exp(w - w1[:, None]), 0.0).to(tl.float64)


@triton.jit
def final_draw(
    logits, tokens, z1_in, mass_in, cut, coins, last_in, removed, rule_in, greedy_in, temperature_in, next_out,
    batch, nodes, vocab, splits, stride_b, stride_m, stride_v,
    GROUP: tl.constexpr, NODES: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Grid (B / GROUP,): the token at which the mass of the last node, children removed, first exceeds the coin.

    The masses of the splits are known; only those that hold a removed token, and the one that is drawn from, are read.
    """
    b = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    draws = (b < batch) & (tl.load(greedy_in + b, mask=b < batch, other=1) == 0)
    draws = draws & (tl.load(rule_in + b, mask=b < batch, other=MARS_PAPER) != MARS_PAPER)
    last = tl.load(last_in + b, mask=draws, other=0)
    row_at = b * stride_b + last * stride_m
    t = tl.load(temperature_in + b, mask=draws, other=1.0)
    lowest = t
    if CUT:
        lowest = tl.load(cut + b * nodes + last, mask=draws, other=0.0)

    split = tl.arange(0, SPLITS)[None, :]
    at = (b * nodes + last)[:, None] * splits + split
    inside = draws[:, None] & (split < splits)
    z1 = tl.load(z1_in + at, mask=inside, other=float("-inf"))
    share = tl.load(mass_in + at, mask=inside, other=0.0)
    w1 = tl.div_rn(tl.max(z1, axis=1), t)
    whole = tl.where(share > 0, share * tl.exp(tl.div_rn(z1, t[:, None]) - w1[:, None]), 0.0).to(tl.float64)

    node = tl.arange(0, NODES)[None, :]
    node_at = b[:, None] * nodes + node
    known = draws[:, None] & (node < nodes)
    gone = tl.load(removed + node_at, mask=known, other=0) != 0
    home = tl.load(tokens + node_at, mask=known, other=0) // BLOCK
    mass = whole
    for s in range(0, splits):
        touched = tl.max((gone & (home == s)).to(tl.int32), axis=1) > 0
        if tl.max(touched.to(tl.int32), axis=0) > 0:
            block = _split_mass(
                logits, tokens, removed, row_at, b, tl.full([GROUP], s, tl.int32), touched, touched, nodes,
                vocab, stride_v, t, w1, lowest, BLOCK, CUT,
            )  # fmt: skip
            mass = tl.where((split == s) & touched[:, None], tl.sum(block, axis=1)[:, None], mass)
    empty = tl.sum(mass, axis=1) <= 0  # only rounding leaves nothing: stay inside the support, as the reference does
    mass = tl.where(empty[:, None], whole, mass)

    wanted = tl.load(coins + b, mask=draws, other=0.0) * tl.sum(mass, axis=1)
    behind = (tl.cumsum(mass, axis=1) <= wanted[:, None]) & (split < splits)
    chosen = tl.minimum(tl.sum(behind.to(tl.int32), axis=1), splits - 1)
    start = tl.sum(tl.where(split < chosen[:, None], mass, 0.0), axis=1)
    block = _split_mass(
        logits, tokens, removed, row_at, b, chosen, draws, draws & ~empty, nodes,
        vocab, stride_v, t, w1, lowest, BLOCK, CUT,
    )  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    found = tl.sum((start[:, None] + tl.cumsum(block, axis=1) <= wanted[:, None]).to(tl.int32), axis=1)
    final = tl.max(tl.where(block > 0, column, 0), axis=1)  # where the block's sum rounds to less than its share
    tl.store(next_out + b, (chosen * BLOCK + tl.minimum(found, final)).to(tl.int64), draws)
