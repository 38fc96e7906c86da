"""Rule `mars` on an engine's tree: the marked children, put into a plain walk, give the path of `eagle_mars.verify`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.engines.tree import linked_tree, relaxed_children
from eagle_mars.tree import DraftTree
from eagle_mars.verify import plan, verify
from eagle_mars.verify.rules import exact
from eagle_mars.verify.statistics import Candidates
from tests.engines.links import drafted_case, links

VOCAB = 10
CONFIGS = [
    VerifyConfig(theta=0.8),
    VerifyConfig(theta=None),
    VerifyConfig(theta=0.6, max_relaxed_per_cycle=1),
    VerifyConfig(theta=0.7, protected_ids=(1, 4)),
    VerifyConfig(margin="logit-gap", gap=1.5),
]


def walk(tree: DraftTree, followed: Tensor, row: int, levels: int) -> list[int]:
    """From the root to the last node whose parent sends the walk there."""
    path = [0]
    while len(path) <= levels:
        chosen = [i for i in (tree.parents[row] == path[-1]).nonzero().flatten().tolist() if followed[row, i]]
        if not chosen:
            break
        path.append(chosen[0])
    return path


@pytest.mark.parametrize("nodes", [2, 7, 16])
def test_links_give_the_tree_back(nodes: int) -> None:
    tree, _, _ = drafted_case(40, nodes, VOCAB, seed=nodes)
    again = linked_tree(tree.tokens, *links(tree), levels=nodes - 1)
    assert torch.equal(again.parents, tree.parents)
    assert torch.equal(again.ancestors, tree.ancestors)


@pytest.mark.parametrize("nodes", [2, 7, 16])
def test_greedy_paths_are_the_cores(nodes: int) -> None:
    count = 200
    tree, logits, _ = drafted_case(count, nodes, VOCAB, seed=nodes)
    configs = [CONFIGS[i % len(CONFIGS)] for i in range(count)]
    rows = plan(configs, vocab_size=VOCAB)
    verdict = verify(tree, logits, rows)
    marked = relaxed_children(tree, logits, rows, nodes)
    exact = (tree.parents >= 0) & (tree.tokens == logits.argmax(-1).gather(1, tree.parents.clamp(min=0)))
    for row in range(count):
        path = walk(tree, exact | marked, row, nodes)
        assert path == verdict.path[row, : int(verdict.n_accepted[row]) + 1].tolist()
        assert marked[row, path].tolist() == verdict.relaxed[row, : len(path)].tolist()
    assert verdict.relaxed.sum() > count / 20


@pytest.mark.parametrize("sampling", [SamplingConfig(temperature=0.9), SamplingConfig(temperature=1.2, top_p=0.8)])
def test_sampled_paths_are_the_cores_under_the_same_coins(sampling: SamplingConfig) -> None:
    """What the engine's test accepts, and which tokens have p = 0, is taken from the core's rule `exact`."""
    count, nodes = 300, 12
    tree, logits, coins = drafted_case(count, nodes, VOCAB, seed=5)
    configs = [CONFIGS[i % len(CONFIGS)] for i in range(count)]
    rows = plan(configs, sampling, vocab_size=VOCAB, batch=count)
    verdict = verify(tree, logits, rows, coins)

    c = Candidates(tree, logits, rows, coins.accept)
    taken = exact(c).exact
    accepts = torch.zeros(count, nodes + 1, dtype=torch.bool)
    accepts.scatter_(1, torch.where(taken, tree.parents, nodes), True)
    marked = relaxed_children(tree, logits, rows, nodes, accepts[:, :nodes], c.has_mass)
    for row in range(count):
        path = walk(tree, taken | marked, row, nodes)
        assert path == verdict.path[row, : int(verdict.n_accepted[row]) + 1].tolist()
        assert marked[row, path].tolist() == verdict.relaxed[row, : len(path)].tolist()
    assert verdict.relaxed.sum() > 50


def test_nothing_is_followed_below_the_walks_end() -> None:
    """A chain of runner-ups deeper than the engine walks: what follows the cut must be the row's own argmax."""
    chain = DraftTree.from_parents(torch.full((1, 6), 2), torch.arange(-1, 5).unsqueeze(0))
    logits = torch.tensor([1.0, 5.0, 4.9]).expand(1, 6, 3)
    rows = plan(VerifyConfig(theta=0.9), vocab_size=3)
    for levels in (0, 2, 5):
        tree = linked_tree(chain.tokens, *links(chain), levels=levels)
        marked = relaxed_children(tree, logits, rows, levels)
        assert marked[0].int().tolist() == [0] + [1] * levels + [0] * (5 - levels)
