"""The reference against the slow oracle, decision by decision, and the guards one by one."""

from __future__ import annotations

import pytest
import torch

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import warp
from eagle_mars.tree import DraftTree
from eagle_mars.verify import plan, unpack, verify
from eagle_mars.verify.statistics import top2
from tests.verify import oracle
from tests.verify.generated import random_coins, random_logits, random_tree

CONFIGS = {
    "exact": VerifyConfig(rule="exact"),
    "mars": VerifyConfig(),
    "mars-gap": VerifyConfig(margin="logit-gap", gap=1.1),
    "mars-longest": VerifyConfig(branch="longest", theta=0.7),
    "mars-capped": VerifyConfig(theta=0.6, max_relaxed_per_cycle=1),
    "mars-budget": VerifyConfig(theta=0.6, max_regret=1.1, branch="longest"),
    "mars-protected": VerifyConfig(theta=0.6, protected_ids=(0,)),
    "mars-paper": VerifyConfig(rule="mars-paper"),
    "mars-released": VerifyConfig(rule="mars-released", theta=0.8),
    "mars-released-q1": VerifyConfig(rule="mars-released", theta=0.8, released_q="one"),
    "mars-released-no-ratio": VerifyConfig(rule="mars-released", released_ratio=False),
    "typical": VerifyConfig(rule="typical"),
    "topk-delta": VerifyConfig(rule="topk-delta", delta=0.15, rank=4),
    "topk-delta-longest": VerifyConfig(rule="topk-delta", branch="longest", protected_ids=(0,)),
    "prob-ratio": VerifyConfig(rule="prob-ratio"),
}
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "t1": SamplingConfig(temperature=1),
    "t0.7-k3": SamplingConfig(temperature=0.7, top_k=3),
    "t1.3-p0.8": SamplingConfig(temperature=1.3, top_p=0.8),
}


def assert_equals_oracle(
    tree: DraftTree, logits: torch.Tensor, config: VerifyConfig, sampling: SamplingConfig, seed: int, vocab: int
) -> int:
    """Compare every row of the batch; returns the number of relaxed tokens seen, so that callers can demand some."""
    coins = random_coins(tree.batch, tree.nodes, torch.Generator().manual_seed(seed))
    rows = plan(config, sampling, vocab_size=vocab, batch=tree.batch)
    verdicts = unpack(verify(tree, logits, rows, coins).pack(tree), tree.max_depth)
    warped = warp(logits, rows.sampling)
    p = warped.double().softmax(-1)
    q = tree.draft_logprob.double().exp()
    for row, got in enumerate(verdicts):
        case = oracle.Case(
            tokens=tree.tokens[row].tolist(),
            parents=tree.parents[row].tolist(),
            z=logits[row].tolist(),
            p=p[row].tolist(),
            w=warped[row].tolist(),
            q=q[row].tolist(),
        )
        expected = oracle.verify(
            case,
            config,
            greedy=sampling.greedy,
            coins=coins.accept[row].tolist(),
            draw=coins.draw[row].item(),
            protected=frozenset(config.protected_ids or ()),
        )
        assert got.path == expected.path
        assert got.relaxed == expected.relaxed[1:]
        assert got.next_token == expected.next_token
        assert got.regret == expected.regret  # multiples of 1/4: sums are exact in any order
        assert got.tokens == [case.tokens[i] for i in expected.path[1:]]
    return sum(sum(got.relaxed) for got in verdicts)


def check_equals_oracle(config: VerifyConfig, sampling: SamplingConfig) -> int:
    """Generated trees of several sizes; returns the number of relaxed tokens seen."""
    relaxed = 0
    for seed, (nodes, vocab) in enumerate([(12, 7), (7, 30), (5, 2), (3, 300), (1, 4), (4, 1)]):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(60, nodes, vocab, generator)
        logits = random_logits(60, nodes, vocab, generator, tree)
        relaxed += assert_equals_oracle(tree, logits, config, sampling, seed, vocab)
    return relaxed


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_oracle_on_generated_trees(name: str, sampling: SamplingConfig) -> None:
    relaxed = check_equals_oracle(CONFIGS[name], sampling)
    at_zero_lossless = name.startswith(("mars-released", "typical")) and sampling.greedy
    assert (relaxed > 0) == (name not in ("exact", "mars-released-no-ratio") and not at_zero_lossless)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top2_of_long_rows_with_ties(dtype: torch.dtype) -> None:
    """Rows of several blocks and a short last one; few distinct values, so the best two often tie across blocks."""
    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 2, 127, 256, 257, 300, 1000):
        logits = torch.randint(0, 40, (3, 30, vocab), generator=generator).to(dtype)
        logits[0, 0, 1:] = float("-inf")
        top = top2(logits)
        order = logits.float().sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(top.t1, order[..., 0])
        assert torch.equal(top.z1, logits.double().gather(-1, order[..., :1]).squeeze(-1))
        if vocab > 1:
            second = order[..., 1].clone()
            second[0, 0] = 0  # nothing but token 0 is finite: there is no runner-up
            assert torch.equal(top.t2, second)
