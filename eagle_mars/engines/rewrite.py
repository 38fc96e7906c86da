"""MARS as a rewrite of the target's rows just before an engine's own verifier. Lossy where it rewrites, else exact.

A row is the target's logits at the position of one draft d. z1 >= z2 are its two best logits, t1 and t2 their tokens
(lowest id on ties), p its distribution after the engine's warpers, q the distribution that d was drawn from (a point
mass where the drafter is greedy). `relaxable` says which rows are rewritten, `force` how:

- greedy: where d = t2 at low margin, logit[d] becomes the one largest;
- sampled: where d is t1 or t2 at low margin and p(d) > 0, the row becomes one-hot on d.

**Claim.** On a chain of drafts the stock verifier then does what rule `mars` of `eagle_mars.verify` does: at
temperature 0 token for token, above it in law.

*Rows that aren't rewritten* are read by the stock verifier as ever, and `mars` is `exact` there: its relaxation needs
the condition above (d = t1 in a greedy row is accepted anyway). *The row at which a chain ends* is such a row, because
the verifier accepts d in every rewritten one, and the row after the last draft has no draft (-1). So the token that
follows the accepted drafts is the stock verifier's, from untouched logits.

*A rewritten greedy row:* d is its only argmax, so the stock verifier accepts d; `mars` accepts t2 at low margin.

*A rewritten sampled row:* the warpers keep a row's best token, so its p is one-hot on d whatever temperature, top-k,
top-p and min-p are. The stock test u < min(1, p(d) / q(d)) passes for every coin u, since coins are below 1. `mars`
accepts d with probability a + (1 - a) * 1 = 1, where a is the exact test's: what that test rejects is relaxed. Both
emit d surely, and no residual is drawn. Given the drafts, rows are independent in both, so the laws of whole chains
agree. The coin that would have told a relaxed token from an exact one is never looked at: above temperature 0 the rows
counted here are an upper bound of the tokens that `mars` calls relaxed.

**Limit.** `limit` keeps the first n rewritten rows of a chain. Greedy, that is `max_relaxed_per_cycle` of `mars`, token
for token. Sampled it is stricter than `mars`: a rewritten row spends one of the n even where the exact test would have
passed, so at most as many tokens are relaxed; rows beyond the n are verified exactly.

Every function is made of tensor operations without a host read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_mars.verify.statistics import Top2, top2

_MINUS_INF = float("-inf")
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def relaxable(
    logits: Tensor,
    drafts: Tensor,
    ratio: Tensor,
    gap: Tensor,
    protected: Tensor,
    greedy: Tensor | None = None,
    masked: Tensor | None = None,
) -> Tensor:
    """[R] bool: rows that `force` has to rewrite; see the module.

    logits: [R, V], any float dtype, after penalties and before temperature. drafts: [R] int64, -1 where a row has none.
    ratio, gap: [R] float64 thresholds of each row's request (`MarsRequest.thresholds`): low margin is z1 > 0 and
        z2 > ratio * z1, or z1 - z2 < gap.
    protected: [V] bool, tokens that relaxation neither accepts nor overrides.
    greedy: [R] bool; None is all. masked: [R] bool, sampled rows whose runner-up has p = 0 (`runner_up_masked`);
        None is none.
    """
    top = _best_two(logits)
    # Below zero the ratio would turn round: a ratio of inf, which means off, would hold for every runner-up.
    low = ((top.z1 > 0) & (top.z2 > ratio * top.z1)) | (top.z1 - top.z2 < gap)
    low = low & ~protected[top.t1] & ~protected[top.t2]
    is_runner_up = drafts == top.t2
    if greedy is None:
        return low & is_runner_up
    if masked is not None:
        is_runner_up = is_runner_up & ~(masked & ~greedy)
    return low & (is_runner_up | (drafts == top.t1) & ~greedy)


def runner_up_masked(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, max_top_k: int
) -> Tensor:
    """[R] bool: the warpers leave the runner-up no probability; warped in the order temperature, min-p, top-k, top-p.

    logits: [R, V]. temperature, top_p (1: off), min_p (0: off): [R] float. top_k: [R] int64 (0: off), none above
    max_top_k, which the host knows. Rows with temperature 0 hold nothing of meaning.

    With the best token alone reaching top_p nothing else is kept, so no vocabulary has to be sorted.
    """
    top = _best_two(logits)
    best = top.z1.float().unsqueeze(1)
    warped = (logits.float() - best) / temperature.unsqueeze(1)
    floor = min_p.float().log().unsqueeze(1)
    if max_top_k:
        ranked = warped.topk(min(max_top_k, warped.shape[1]), dim=1).values
        last = ranked.gather(1, (top_k - 1).clamp(0, ranked.shape[1] - 1).unsqueeze(1))
        floor = torch.maximum(floor, last.masked_fill((top_k <= 0).unsqueeze(1), _MINUS_INF))
    mass = warped.exp().masked_fill(warped < floor, 0.0).sum(1)
    runner_up = (top.z2.float() - best.squeeze(1)) / temperature
    return (runner_up < floor.squeeze(1)) | ((top_p < 1) & (top_p * mass <= 1))


def limit(rows: Tensor, position: Tensor, max_relaxed: Tensor) -> Tensor:
    """[R] bool: the first `max_relaxed` true rows of each chain.

    rows: [R] bool, chain after chain. position: [R] int64, a row's place in its chain from 0. max_relaxed: [R] int64.

    Counting from the chain's start is counting along the path: a row is reached only if all before it were accepted.
    """
    count = rows.long().cumsum(0)
    start = torch.arange(rows.shape[0], device=rows.device) - position
    before = count[start] - rows[start].long()
    return rows & (count - before <= max_relaxed)


def force(logits: Tensor, rows: Tensor, drafts: Tensor, greedy: Tensor | None = None) -> None:
    """Rewrite `rows` of logits [R, V] in place so that any verifier accepts their drafts.

    rows: [R] bool. drafts: [R] int64. greedy: [R] bool; None is all, which spares a pass over the vocabulary.
    """
    at = drafts.clamp(min=0).unsqueeze(1)
    own, best = logits.gather(1, at), logits.amax(1, keepdim=True)
    raised = rows.unsqueeze(1)
    if greedy is not None:
        raised = raised & greedy.unsqueeze(1)
        logits.masked_fill_((rows & ~greedy).unsqueeze(1), _MINUS_INF)
    logits.scatter_(1, at, torch.where(raised, _next_above(best), own))


def _best_two(logits: Tensor) -> Top2:
    top = top2(logits.unsqueeze(0))
    return Top2(top.z1[0], top.t1[0], top.z2[0], top.t2[0])


def _next_above(values: Tensor) -> Tensor:
    """The next larger number of the same dtype, subnormal ones left out, since kernels may flush them to zero."""
    bits = values.view(_INTEGERS[values.itemsize])
    above = torch.where(values > 0, bits + 1, bits - 1).view(values.dtype)
    smallest = torch.finfo(values.dtype).tiny
    return torch.where(values.abs() < smallest, smallest, above)
