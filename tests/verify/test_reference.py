"""The reference against the slow oracle, decision by decision, and the guards one by one."""

from __future__ import annotations

import pytest
import torch

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import warp
from eagle_mars.tree import DraftTree
from eagle_mars.verify import plan, unpack, verify
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
    p = warp(logits, rows.sampling).double().softmax(-1)
    for row, got in enumerate(verdicts):
        case = oracle.Case(tree.tokens[row].tolist(), tree.parents[row].tolist(), logits[row].tolist(), p[row].tolist())
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


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_oracle_on_generated_trees(name: str, sampling: SamplingConfig) -> None:
    relaxed = 0
    for seed, (nodes, vocab) in enumerate([(12, 7), (7, 30), (5, 2), (3, 140), (1, 4), (4, 1)]):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(60, nodes, vocab, generator)
        logits = random_logits(60, nodes, vocab, generator, tree)
        logits[..., 0] = logits[..., 0].clamp(min=-3)  # never a row without a finite logit
        relaxed += assert_equals_oracle(tree, logits, CONFIGS[name], sampling, seed, vocab)
    assert (relaxed > 0) == (name != "exact")
