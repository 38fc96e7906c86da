"""The rewrite of rows makes a stock verifier of chains decide as rule `mars` of `eagle_mars.verify` does."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.engines.request import MarsRequest
from eagle_mars.engines.rewrite import force, limit, relaxable, runner_up_masked
from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from eagle_mars.verify import verify
from tests.verify.generated import random_logits
from tests.verify.oracle import Case
from tests.verify.test_law import Law, cases, implemented_laws

VOCAB = 12
REQUESTS = [
    MarsRequest(),
    MarsRequest(theta=0.9),
    MarsRequest(theta=0.75),
    MarsRequest(theta=0.75, max_relaxed=1),
    MarsRequest(margin="logit-gap", gap=1.0),
    MarsRequest(margin="logit-gap", gap=2.0, max_relaxed=2),
]


def core(request: MarsRequest, protected: tuple[int, ...]) -> VerifyConfig:
    """The core's options that mean the same."""
    return VerifyConfig(
        theta=request.theta,
        margin=request.margin,
        gap=request.gap,
        protected_ids=protected,
        max_relaxed_per_cycle=request.max_relaxed,
    )


def chains(count: int, drafts: int, seed: int) -> tuple[DraftTree, Tensor]:
    """Most drafts are among the two best tokens of their row, as those of a trained head are."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (count, drafts + 1), generator=generator)
    parents = torch.arange(-1, drafts).expand(count, -1).contiguous()
    logits = random_logits(count, drafts + 1, VOCAB, generator, DraftTree.from_parents(tokens, parents))
    best = logits[:, :-1].topk(2).indices
    choice = torch.randint(0, 3, (count, drafts, 1), generator=generator)
    tokens[:, 1:] = torch.cat([best, tokens[:, 1:, None]], dim=-1).gather(-1, choice).squeeze(-1)
    return DraftTree.from_parents(tokens, parents), logits


def columns(requests: list[MarsRequest], rows_each: int) -> tuple[Tensor, Tensor]:
    ratio, gap = torch.tensor([r.thresholds for r in requests], dtype=torch.float64).unbind(1)
    return ratio.repeat_interleave(rows_each), gap.repeat_interleave(rows_each)


def protect(*ids: int, vocab: int = VOCAB) -> Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[list(ids)] = True
    return mask


def greedy_chain(drafts: list[int], logits: Tensor) -> list[int]:
    """The stock verifier: drafts are accepted while they are the argmax, and the argmax of the next row follows."""
    emitted = []
    for row, best in enumerate(logits.argmax(-1).tolist()):
        emitted.append(best)
        if row == len(drafts) or drafts[row] != best:
            break
    return emitted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_chains_are_the_cores_token_for_token(dtype: torch.dtype) -> None:
    drafts, count = 5, 600
    tree, logits = chains(count, drafts, seed=1)
    logits = logits.to(dtype)
    requests = [REQUESTS[i % len(REQUESTS)] for i in range(count)]
    verdict = verify(tree, logits, [core(r, (0, 3)) for r in requests])

    flat = logits.flatten(0, 1).clone()
    drafted = torch.cat([tree.tokens[:, 1:], torch.full((count, 1), -1)], dim=1).flatten()
    rows = relaxable(flat, drafted, *columns(requests, drafts + 1), protect(0, 3))
    most = torch.tensor([1000 if r.max_relaxed is None else r.max_relaxed for r in requests])
    position = torch.arange(drafts + 1).repeat(count)
    rows = limit(rows, position, most.repeat_interleave(drafts + 1))
    untouched = flat[~rows].clone()
    force(flat, rows, drafted)
    assert torch.equal(flat[~rows], untouched)

    relaxed = 0
    for i, rewritten in enumerate(flat.unflatten(0, (count, drafts + 1))):
        emitted = greedy_chain(tree.tokens[i, 1:].tolist(), rewritten)
        accepted = int(verdict.n_accepted[i])
        expected = [*tree.tokens[i, 1 : accepted + 1].tolist(), int(verdict.next_token[i])]
        assert emitted == expected
        mine = rows.unflatten(0, (count, drafts + 1))[i, : len(emitted) - 1].tolist()
        assert mine == verdict.relaxed[i, 1 : accepted + 1].tolist()
        relaxed += sum(mine)
    assert relaxed > 100


def rewritten_law(case: Case, theta: float, protected: tuple[int, ...]) -> tuple[Law, int]:
    """Law of the stock chain sampler on rewritten rows, as fractions, and how many rows were rewritten.

    It accepts d with p(d), and draws from p without d where it doesn't: EAGLE's and the engines' rule for a point mass.
    """
    logits = torch.tensor(case.z, dtype=torch.float64)
    drafts = torch.tensor([*case.tokens[1:], -1])
    request = MarsRequest(theta=theta)
    sampled = torch.zeros(len(drafts), dtype=torch.bool)
    has_mass = logits.gather(1, drafts.clamp(min=0).unsqueeze(1)).squeeze(1) > float("-inf")
    rows = relaxable(logits, drafts, *columns([request], len(drafts)), protect(*protected, vocab=4), sampled, ~has_mass)
    force(logits, rows, drafts, sampled)
    assert torch.equal(logits[~rows], torch.tensor(case.z, dtype=torch.float64)[~rows])

    law: Law = defaultdict(Fraction)
    reached, emitted = Fraction(1), ()
    for row, p in enumerate(case.p):
        if rows[row]:
            assert logits[row].softmax(-1)[drafts[row]] == 1
            p = [Fraction(int(v == drafts[row])) for v in range(len(p))]
        d = int(drafts[row])
        kept = [Fraction(0) if v == d else x for v, x in enumerate(p)]
        for v, x in enumerate(kept):
            # p(d) + sum(kept) = 1, so the residual's normaliser is the chance of a rejection
            law[(*emitted, v)] += reached * x
        reached *= p[d] if d >= 0 else 0
        emitted = (*emitted, d)
    return {e: x for e, x in law.items() if x}, int(rows.sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("protected", [(), (1,)])
def test_sampled_chains_have_the_cores_law(temperature: float, protected: tuple[int, ...]) -> None:
    rewritten = 0
    for nodes in (2, 3, 4, 5):
        chain = list(range(-1, nodes - 1))
        collection = [replace(case, parents=chain) for case in cases(nodes, temperature)]
        laws = implemented_laws(collection, VerifyConfig(theta=0.9, protected_ids=protected), temperature)
        for case, law in zip(collection, laws, strict=True):
            mine, rows = rewritten_law(case, 0.9, protected)
            assert mine == {emitted: x for emitted, x in law.items() if x}
            rewritten += rows
    assert rewritten > 20


@pytest.mark.parametrize(
    ("sampling", "some_are_masked"),
    [
        (SamplingConfig(temperature=0.7), False),
        (SamplingConfig(temperature=1.3, top_k=1), True),
        (SamplingConfig(temperature=1.3, top_k=3), False),
        (SamplingConfig(temperature=0.8, top_p=0.6), True),
        (SamplingConfig(temperature=0.8, top_k=4, top_p=0.7), True),
        (SamplingConfig(temperature=1.0, min_p=0.4), True),
        (SamplingConfig(temperature=1.0, min_p=0.01, top_k=5), False),
    ],
)
def test_a_runner_up_without_probability_is_not_relaxed(sampling: SamplingConfig, some_are_masked: bool) -> None:
    """With a coin just below one the core accepts what it relaxes, and a draft that has all the probability anyway."""
    count = 500
    tree, logits = chains(count, 1, seed=2)
    logits += (
        torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) / 16
    )  # ties at a cut are the engine's
    coins = Coins(torch.full((count, 2), 1 - 2**-24), torch.full((count,), 0.5, dtype=torch.float64))
    verdict = verify(tree, logits, VerifyConfig(theta=0.7), coins, sampling=sampling)

    def column(value: float) -> Tensor:
        return torch.full((count,), value, dtype=torch.float64)

    row, drafts, sampled = logits[:, 0], tree.tokens[:, 1], torch.zeros(count, dtype=torch.bool)
    masked = runner_up_masked(
        row,
        column(sampling.temperature),
        torch.full((count,), sampling.top_k),
        column(sampling.top_p),
        column(sampling.min_p),
        sampling.top_k,
    )
    rows = relaxable(row, drafts, column(0.7), column(0.0), protect(), sampled, masked)
    certain = verdict.relaxed[:, 1] | (
        verdict.n_accepted == 0
    )  # the rest has p(d) = 1: rewritten or not, it is followed
    assert torch.equal(rows[certain], verdict.relaxed[:, 1][certain])
    assert rows.any()
    assert bool((masked & relaxable(row, drafts, column(0.7), column(0.0), protect())).any()) == some_are_masked


def test_rows_of_a_mixed_batch_are_rewritten_as_if_alone() -> None:
    tree, logits = chains(300, 1, seed=4)
    rows_in, drafts = logits[:, 0], tree.tokens[:, 1]
    greedy = torch.arange(300) % 2 == 0
    ratio, gap = columns([MarsRequest(theta=0.8)], 300)
    rows = relaxable(rows_in, drafts, ratio, gap, protect(), greedy)
    assert torch.equal(rows[greedy], relaxable(rows_in, drafts, ratio, gap, protect())[greedy])
    mixed = rows_in.clone()
    force(mixed, rows, drafts, greedy)
    alone = rows_in.clone()
    force(alone, rows & greedy, drafts)
    assert torch.equal(mixed[greedy], alone[greedy])
    followed = mixed[rows & ~greedy].isfinite()
    assert followed.sum(-1).eq(1).all()
    assert torch.equal(followed.int().argmax(-1), drafts[rows & ~greedy])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("best", [24.125, 1.0, 0.0, -0.0, -1.0, -17.5, 6e-8, -6e-8, 32768.0])
def test_a_forced_draft_is_the_only_argmax(dtype: torch.dtype, best: float) -> None:
    """Ties, zero, negative and subnormal logits: the draft ends one step above the best, whatever its own id."""
    logits = torch.full((2, 5), float("-inf"), dtype=dtype)
    logits[:, 1] = logits[:, 4] = best
    logits[:, 2] = best - 1
    drafts = torch.tensor([4, 2])
    force(logits, torch.ones(2, dtype=torch.bool), drafts)
    assert torch.equal(logits.argmax(-1), drafts)
    assert logits.eq(logits.amax(-1, keepdim=True)).sum() == 2
    smallest, infinity = torch.finfo(dtype).tiny, torch.tensor(float("inf"), dtype=dtype)
    above = torch.nextafter(logits.new_tensor(best), infinity) if abs(best) >= smallest else smallest
    assert (logits.amax(-1) == above).all()


@pytest.mark.parametrize("request_", [MarsRequest(theta=0.5), MarsRequest(), MarsRequest(margin="logit-gap", gap=0.05)])
@pytest.mark.parametrize("row", [[float("nan"), 1, 1], [float("-inf")] * 3, [float("inf"), 1, 1], [-2, -2.1, -9]])
def test_a_row_that_says_nothing_is_left_alone(row: list[float], request_: MarsRequest) -> None:
    logits, drafts = torch.tensor([row, row]), torch.tensor([0, 1])
    sampled = torch.zeros(2, dtype=torch.bool)
    rows = relaxable(logits, drafts, *columns([request_], 2), protect(vocab=3), sampled)
    assert not rows.any()
    before = logits.clone()
    force(logits, rows, drafts, sampled)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())


def test_the_limit_counts_from_each_chains_start() -> None:
    rows = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1]).bool()
    position = torch.tensor([0, 1, 2, 3, 0, 1, 0, 1])
    most = torch.tensor([2, 2, 2, 2, 1, 1, 0, 0])
    assert limit(rows, position, most).int().tolist() == [1, 0, 1, 0, 1, 0, 0, 0]
