"""The closed forms that measure rules, against what `verify` does with many coins."""

from __future__ import annotations

import pytest
import torch

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import Coins
from eagle_mars.tree import DraftTree
from eagle_mars.verify import verify
from evaluation.law import Node, law, total_variation

RELEASED = {"rule": "mars-released", "theta": 0.9}
RULES = [
    VerifyConfig(rule="exact"),
    VerifyConfig(theta=0.9),
    VerifyConfig(theta=0.5),
    VerifyConfig(margin="logit-gap", gap=1.0),
    VerifyConfig(rule="mars-paper", theta=0.9),
    VerifyConfig(**RELEASED),
    VerifyConfig(**RELEASED, released_ratio=False),
    VerifyConfig(**RELEASED, released_q="one"),
    VerifyConfig(**RELEASED, released_q="one", released_ratio=False),
]
LOGITS = torch.tensor([[2.0, 1.9, 0.5, -1.0, 0.0], [3.0, 1.0, 0.5, 2.0, 0.0], [-0.5, -0.6, -2.0, -1.0, -4.0]])


@pytest.mark.parametrize("config", RULES, ids=str)
@pytest.mark.parametrize("children", [[], [1], [1, 0], [4, 1, 2]])
def test_law_is_what_verify_does(config: VerifyConfig, children: list[int]) -> None:
    draws = 800
    generator = torch.Generator().manual_seed(1)
    nodes = len(children) + 1
    q = [0.6 / 2**i for i in range(len(children))]
    tree = DraftTree.from_parents(
        torch.tensor([[0, *children]]).expand(draws, nodes),
        torch.tensor([[-1] + [0] * len(children)]).expand(draws, nodes),
        torch.tensor([[1.0, *q]]).log().expand(draws, nodes),
        max_depth=1,
    )
    coins = Coins(
        torch.rand(draws, nodes, generator=generator),
        torch.rand(draws, generator=generator, dtype=torch.float64),
    )
    for logits in LOGITS:
        verdict = verify(tree, logits.expand(draws, nodes, 5), config, coins, sampling=SamplingConfig(temperature=1.0))
        child = tree.tokens.gather(1, verdict.path.clamp(min=0)[:, 1:]).squeeze(1)
        first = torch.where(verdict.n_accepted > 0, child, verdict.next_token)
        seen = torch.bincount(first, minlength=5) / draws
        w = logits.double()
        node = Node(logits, w.softmax(-1), w, children, q)
        # 5 standard deviations of a share among 800 draws, whatever the share is.
        assert total_variation(seen.double(), law(node, config)) < 5 * (0.25 / draws) ** 0.5


def test_exact_is_the_target() -> None:
    w = LOGITS[0].double()
    node = Node(LOGITS[0], w.softmax(-1), w, [1, 2], [0.5, 0.2])
    assert total_variation(law(node, VerifyConfig(rule="exact")), node.p) == 0
