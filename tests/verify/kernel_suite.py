"""The kernels against the reference: on a GPU, or under Triton's interpreter if TRITON_INTERPRET=1 is set.

test_kernels.py runs it interpreted, in a process of its own because triton must be imported with the variable set;
scripts/gpu_checks.sh runs it on a GPU. Discrete results must be equal. Coins are
kept 1e-5 away from every threshold that they are compared with: kernels sum probabilities in float32 and block by
block, so a threshold may differ from the reference's float64 one by about 1e-6, and a coin in between may fall either
way.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import Coins, History, warp
from eagle_mars.tree import DraftTree
from eagle_mars.verify import Verdict, kernels, plan, triton_backend, verify
from eagle_mars.verify.plan import RowPlan
from eagle_mars.verify.statistics import Candidates
from eagle_mars.verify.triton_backend import Launch, verify_triton
from tests.verify.generated import random_coins, random_logits, random_tree

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SAFE = 1e-5
LAUNCH = Launch(rows=512, block=16, group=128) if INTERPRETED else Launch(rows=1, block=16)
CONFIGS = {
    "exact": [VerifyConfig(rule="exact"), VerifyConfig(theta=None)],
    "mars": [
        VerifyConfig(theta=0.8),
        VerifyConfig(margin="logit-gap", gap=1.1),
        VerifyConfig(theta=0.7, branch="longest"),
        VerifyConfig(theta=0.6, max_relaxed_per_cycle=1),
        VerifyConfig(theta=0.6, max_regret=1.1, branch="longest", protected_ids=(0,)),
    ],
    "mars-paper": [VerifyConfig(rule="mars-paper", theta=0.8), VerifyConfig(rule="mars-paper", branch="longest")],
    "mars-released": [
        VerifyConfig(rule="mars-released", theta=0.8),
        VerifyConfig(rule="mars-released", released_ratio=False),
        VerifyConfig(rule="mars-released", released_q="one"),
    ],
}
SAMPLINGS = {
    "greedy": [SamplingConfig()],
    "sampled": [SamplingConfig(temperature=1), SamplingConfig(temperature=0.7)],
    "truncated": [
        SamplingConfig(temperature=1, top_k=5),
        SamplingConfig(temperature=1.3, top_p=0.8, min_p=0.05),
        SamplingConfig(),
    ],
}


@pytest.fixture(scope="module", autouse=True)
def _patch_the_language_once() -> None:
    """The interpreter patches triton.language anew in every call of a device function, which is most of its time."""
    if not INTERPRETED:
        return
    for function in (tl.standard.sum, kernels.row_statistics):
        interpreter._patch_lang(function.fn)
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


@pytest.fixture(autouse=True)
def _poison_uninitialised_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)
        return torch.full(shape, True if dtype == torch.bool else torch.iinfo(dtype).max, dtype=dtype, device=device)

    monkeypatch.setattr(triton_backend.torch, "empty", poisoned)


def away_from_thresholds(tree: DraftTree, logits: torch.Tensor, rows: RowPlan, coins: Coins) -> Coins:
    c = Candidates(tree, logits, rows, coins.accept)
    q = torch.where(rows.draft_q.unsqueeze(1), tree.draft_logprob.double().exp().clamp(min=1e-10), 1.0)
    accept = coins.accept.double()
    for mass in (c.p, c.p / q):
        threshold = mass / (1 - c.mass_before).clamp(min=1e-12)
        near = (accept - threshold).abs() < SAFE
        accept = torch.where(near, (threshold + 3 * SAFE) % 1, accept)
    draw = coins.draw.clone()
    first = verify(tree, logits, rows, Coins(accept.float(), draw), backend="reference", check=False)
    last = first.path.gather(1, first.n_accepted.unsqueeze(1)).squeeze(1)
    mass = warp(logits, rows.sampling)[torch.arange(tree.batch), last].double().softmax(-1)
    for row in range(tree.batch):
        children = tree.tokens[row][tree.parents[row] == last[row]]
        for weights in (mass[row], mass[row].index_fill(0, children, 0.0)):
            borders = weights.cumsum(0) / weights.sum().clamp(min=1e-30)
            while (borders - draw[row]).abs().min() < SAFE:
                draw[row] = (draw[row] + 3 * SAFE) % 1
    return Coins(accept.float(), draw)


def moved(value: Any, device: str = DEVICE) -> Any:
    """A tensor, or a dataclass of tensors, on the device."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{k: moved(v, device) for k, v in vars(value).items()})
    return value.to(device) if isinstance(value, torch.Tensor) else value


def run_kernels(*arguments: Any, launch: Launch = LAUNCH, **options: Any) -> Verdict:
    """`verify_triton` on the device, its verdict on the CPU."""
    options = {name: moved(value) for name, value in options.items()}
    return moved(verify_triton(*map(moved, arguments), launch=launch, **options), "cpu")


def assert_equal(got: Verdict, expected: Verdict) -> None:
    for name in ("path", "n_accepted", "next_token", "relaxed", "invalid", "low_margin", "rescued", "nonpositive_top"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.regret, expected.regret, rtol=1e-6, atol=0)  # float32 sums of a few differences


@pytest.mark.parametrize("warp", SAMPLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_generated_trees(dtype: torch.dtype, warp: str) -> None:
    """Per rule and dtype 3 x 168 = 504 trees; all rules and options share each launch, row by row."""
    each, nodes, vocab = 168, 11, 40
    configs = [CONFIGS[rule][i % len(CONFIGS[rule])] for rule in CONFIGS for i in range(each)]
    samplings = [SAMPLINGS[warp][i % len(SAMPLINGS[warp])] for i in range(len(configs))]
    generator = torch.Generator().manual_seed(len(warp))
    tree = random_tree(len(configs), nodes, vocab, generator)
    logits = random_logits(len(configs), nodes, vocab, generator, tree).to(dtype)
    rows = plan(configs, samplings, vocab_size=vocab)
    coins = away_from_thresholds(tree, logits, rows, random_coins(len(configs), nodes, generator))
    spent = torch.rand(len(configs), generator=generator, dtype=torch.float64).round(decimals=1) * 2
    expected = verify(tree, logits, rows, coins, spent_regret=spent, backend="reference")
    assert_equal(run_kernels(tree, logits, rows, coins, spent), expected)
    for rule in ("mars", "mars-paper"):
        assert expected.relaxed[rows.rows_with(frozenset({rule}))].any()


@pytest.mark.parametrize(("nodes", "vocab", "block"), [(1, 5, 16), (3, 1, 16), (2, 2, 16), (70, 33, 16), (5, 300, 64)])
def test_shapes(nodes: int, vocab: int, block: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    tree = random_tree(6, nodes, vocab, generator)
    logits = random_logits(6, nodes, vocab, generator, tree)
    rows = plan(VerifyConfig(theta=0.7), SamplingConfig(temperature=1), vocab_size=vocab, batch=6)
    coins = away_from_thresholds(tree, logits, rows, random_coins(6, nodes, generator))
    got = run_kernels(tree, logits, rows, coins, launch=Launch(rows=64, block=block, group=2))
    assert_equal(got, verify(tree, logits, rows, coins, backend="reference"))


def test_strided_and_offset_inputs() -> None:
    generator = torch.Generator().manual_seed(3)
    tree = random_tree(9, 8, 40, generator)
    shared = dataclasses.replace(tree, **{k: v[:1].expand_as(v) for k, v in vars(tree).items() if k != "max_depth"})
    tree = DraftTree.from_parents(*(x.contiguous() for x in (shared.tokens, shared.parents, shared.draft_logprob)))
    logits = random_logits(9, 8, 40, generator, tree)
    storage = torch.full((8, 43, 11), float("nan"), device=DEVICE)
    view = storage[:, 2:42, 1:10].permute(2, 0, 1)
    view.copy_(logits)
    rows = plan(VerifyConfig(), SamplingConfig(temperature=1, top_k=7), vocab_size=40, batch=9)
    coins = away_from_thresholds(tree, logits, rows, random_coins(9, 8, generator))
    coins = dataclasses.replace(coins, accept=coins.accept.t().contiguous().t())
    got = verify_triton(moved(shared), view, moved(rows), moved(coins), launch=LAUNCH)
    assert_equal(moved(got, "cpu"), verify(tree, logits, rows, coins))


def test_faults_padding_and_penalties() -> None:
    tokens, parents = torch.tensor([[3, 1, 2, 0]] * 4), torch.tensor([[-1, 0, 1, -1]] * 4)
    tree = DraftTree.from_parents(tokens, parents)
    logits = torch.randn(4, 4, 20, generator=torch.Generator().manual_seed(5))
    logits[0, 1, 17] = float("nan")
    logits[1, 2] = float("-inf")
    logits[2, 0, 4] = float("inf")
    logits[3, 3] = float("nan")  # a padding node's row: nobody reads it
    history = History(prompt=torch.tensor([[1, 2]] * 4), generated=torch.tensor([[5, -1]] * 4))
    rows = plan(VerifyConfig(), SamplingConfig(repetition_penalty=1.3), vocab_size=20, batch=4)
    expected = verify(tree, logits, rows, history=history, check=False, backend="reference")
    got = run_kernels(tree, logits, rows, history=history)
    assert got.invalid.tolist() == expected.invalid.tolist() == [1, 2, 2, 0]
    assert got.path[3].tolist() == expected.path[3].tolist()


def test_a_residual_without_mass_stays_inside_the_support() -> None:
    """p is one token, and a coin of rounding's making rejects it: its own mass is all there is to draw from."""
    tree = DraftTree.from_parents(torch.tensor([[1, 2]]), torch.tensor([[-1, 0]]))
    logits = torch.full((1, 2, 20), float("-inf"))
    logits[..., 2] = 1.0
    rows = plan(VerifyConfig(rule="exact"), SamplingConfig(temperature=1), vocab_size=20)
    coins = Coins(torch.full((1, 2), 1.5), torch.tensor([0.25], dtype=torch.float64))
    got = run_kernels(tree, logits, rows, coins)
    assert_equal(got, verify(tree, logits, rows, coins))
    assert got.next_token.tolist() == [2]


if not INTERPRETED:

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_the_host_never_waits(temperature: float) -> None:
        generator = torch.Generator().manual_seed(6)
        tree = random_tree(2, 8, 40, generator)
        logits = random_logits(2, 8, 40, generator, tree)
        rows = plan(VerifyConfig(), SamplingConfig(temperature=temperature), vocab_size=40, batch=2)
        arguments = [moved(x) for x in (tree, logits, rows, random_coins(2, 8, generator))]
        verify_triton(*arguments)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            verify(*arguments, check=False).pack(arguments[0])
        finally:
            torch.cuda.set_sync_debug_mode("default")
