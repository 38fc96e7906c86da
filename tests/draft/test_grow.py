"""Tree growth on heads that are tables, where every score is known: the worked example, ties, chains, NaN."""

from __future__ import annotations

import math
from itertools import groupby

import pytest
import torch
from torch import Tensor

from eagle_mars.config import DraftConfig
from eagle_mars.draft.drafter import Drafter
from eagle_mars.errors import ConfigError
from eagle_mars.tree import DraftTree
from tests.draft.heads import TableHead

DRAFT_IDS = torch.tensor([10, 20, 30, 40, 50, 60, 70, 90, 100])  # of the worked example, EAGLE_SPEC 3.2
MARKOV = {
    110: {70: 0.70, 30: 0.20},
    70: {50: 0.80, 90: 0.10},
    30: {20: 0.50, 60: 0.30},
    50: {10: 0.90, 40: 0.05},
    20: {60: 0.60, 100: 0.10},
}


def grow(head: TableHead, root: int, config: DraftConfig, before: tuple[int, ...] = (0,)) -> DraftTree:
    drafter = Drafter(head, config)
    tokens = torch.tensor([[*before, root]])
    drafter.extend(torch.zeros(1, tokens.shape[1] - 1, 1), tokens[:, 1:])
    return drafter.grow(tokens[:, -1])


def markov_head() -> TableHead:
    """Probabilities of the example; what they leave is spread evenly over the other draft tokens."""
    table = torch.zeros(111, len(DRAFT_IDS))
    for token, children in MARKOV.items():
        rest = (1 - sum(children.values())) / (len(DRAFT_IDS) - len(children))
        table[token] = torch.tensor([children.get(int(i), rest) for i in DRAFT_IDS]).log()
    return TableHead(table, DRAFT_IDS)


def test_worked_example() -> None:
    head = markov_head()
    tree = grow(head, 110, DraftConfig(total_token=5, depth=2, top_k=2), before=(10, 80))
    assert tree.tokens.tolist() == [[110, 70, 30, 50, 10]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3]]
    assert tree.depth.tolist() == [[0, 1, 1, 2, 3]]
    rows = ["".join(str(int(x)) for x in row) for row in tree.ancestors[0]]
    assert rows == ["10000", "11000", "10100", "11010", "11011"]
    assert tree.paths() == [[[0, 2], [0, 1, 3, 4]]]
    assert tree.max_depth == 3
    expected = torch.tensor([[1, 0.7, 0.2, 0.8, 0.9]]).log()
    torch.testing.assert_close(tree.draft_logprob, expected)  # one rounding of log-softmax


def test_worked_example_calls_of_the_head() -> None:
    head = markov_head()
    grow(head, 110, DraftConfig(total_token=5, depth=2, top_k=2), before=(10, 80))
    real, first, second = head.calls
    assert (real[0].tolist(), real[1].tolist(), real[2]) == ([[80, 110]], [[0, 1]], None)
    assert (first[0].tolist(), first[1].tolist()) == ([[70, 30]], [[2, 2]])
    assert (second[0].tolist(), second[1].tolist()) == ([[50, 20]], [[3, 3]])
    assert first[2] is not None
    assert second[2] is not None
    assert first[2][0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]  # two real rows, then the draft rows
    assert second[2][0, 0].int().tolist() == [[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1]]


def peaky_head(seed: int, vocab: int = 24) -> TableHead:
    """A head so sure of its best token that its log-probability is 0 or next to it: children tie with parents."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, vocab, generator=generator)
    best = torch.randint(0, vocab, (vocab, 1), generator=generator)
    lead = torch.tensor([0.5, 12.0, 40.0])[torch.randint(0, 3, (vocab, 1), generator=generator)]
    return TableHead(table.scatter_add(1, best, lead))


def oracle(head: TableHead, root: int, config: DraftConfig) -> list[tuple[int, int, float]]:
    """(token, parent, own log-probability) of every node, by the text of EAGLE_SPEC 3.1, in Python and fp32."""
    k = config.top_k
    table = head.table

    def children(token: int) -> list[tuple[int, Tensor]]:
        best, ids = table[token].topk(k)
        return list(zip(ids.tolist(), best - table[token].logsumexp(0), strict=True))

    pool = [(token, -1, own, own) for token, own in children(root)]  # token, parent's flat number, own, score
    beam = list(range(k))
    for _ in range(config.depth):
        first = len(pool)
        pool += [(token, flat, own, pool[flat][3] + own) for flat in beam for token, own in children(pool[flat][0])]
        beam = sorted(range(first, len(pool)), key=lambda flat: (-pool[flat][3].item(), flat))[:k]
    kept = sorted(sorted(range(len(pool)), key=lambda flat: (-pool[flat][3].item(), flat))[: config.total_token - 1])
    index = {-1: 0, **{flat: i + 1 for i, flat in enumerate(kept)}}
    return [(root, -1, 0.0)] + [(pool[flat][0], index[pool[flat][1]], pool[flat][2].item()) for flat in kept]


@pytest.mark.parametrize("seed", range(40))
def test_selection_equals_the_oracle_under_ties(seed: int) -> None:
    """The oracle looks parents up by name: it fails if a parent of a selected node isn't selected."""
    head = peaky_head(seed)
    depth, top_k = 1 + seed % 5, 2 + seed % 4
    config = DraftConfig(total_token=2 + seed % (top_k + depth * top_k**2), depth=depth, top_k=top_k)
    tree = grow(head, seed % 24, config)
    expected = oracle(head, seed % 24, config)
    assert tree.tokens[0].tolist() == [token for token, _, _ in expected]
    assert tree.parents[0].tolist() == [parent for _, parent, _ in expected]
    torch.testing.assert_close(tree.draft_logprob[0], torch.tensor([own for _, _, own in expected]))


def test_peaky_heads_do_tie() -> None:
    """Otherwise the test above would not be about ties."""
    tied = 0
    for seed in range(40):
        tree = grow(peaky_head(seed), seed % 24, DraftConfig(total_token=12, depth=4, top_k=4))
        tied += int((tree.draft_logprob[0, 1:] == 0).sum())
    assert tied > 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tree_is_well_formed(dtype: torch.dtype) -> None:
    for seed in range(30):
        head = peaky_head(seed).to(dtype)
        tree = grow(head, 0, DraftConfig(total_token=20, depth=4, top_k=5))
        assert_well_formed(tree)


def assert_well_formed(tree: DraftTree) -> None:
    """Parents precede children, one level apart; levels ascend; siblings are contiguous, best first, distinct."""
    parents, depth, tokens = tree.parents[0].tolist(), tree.depth[0].tolist(), tree.tokens[0].tolist()
    assert parents[0] == -1
    assert depth[0] == 0
    assert depth == sorted(depth)
    assert tree.max_depth >= depth[-1]
    for node in range(1, tree.nodes):
        assert 0 <= parents[node] < node
        assert depth[node] == depth[parents[node]] + 1
    assert len([parent for parent, _ in groupby(parents)]) == len(set(parents))
    assert len({(parents[node], tokens[node]) for node in range(tree.nodes)}) == tree.nodes
    for node in range(2, tree.nodes):
        if parents[node] == parents[node - 1]:
            assert tree.draft_logprob[0, node] <= tree.draft_logprob[0, node - 1]


def test_nan_from_the_head_leaves_a_well_formed_tree() -> None:
    head = peaky_head(3)
    head.table[5:12] = math.nan
    for root in range(24):
        tree = grow(head, root, DraftConfig(total_token=20, depth=3, top_k=4))
        assert_well_formed(tree)
        assert not tree.draft_logprob.isnan().any()


def test_top_k_of_one_is_the_greedy_chain() -> None:
    head = peaky_head(1)
    tree = grow(head, 7, DraftConfig.chain(6))
    expected = [7]
    for _ in range(6):
        expected.append(int(head.table[expected[-1]].argmax()))
    assert tree.tokens[0].tolist() == expected
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 3, 4, 5]


def test_depth_of_zero_is_one_level() -> None:
    tree = grow(peaky_head(1), 7, DraftConfig(total_token=4, depth=0, top_k=3))
    assert tree.parents[0].tolist() == [-1, 0, 0, 0]
    assert tree.max_depth == 1


@pytest.mark.parametrize(("stop", "nodes"), [(0.9, 3), (1.03, 7), (1.2, 11)])
def test_growth_ends_where_the_head_is_undecided(stop: float, nodes: int) -> None:
    """Square roots of the mean entropies of the worked example: .998 at the root, 1.061 over its two children."""
    config = DraftConfig(total_token=11, depth=2, top_k=2, entropy_stop=stop)
    tree = grow(markov_head(), 110, config, before=(10, 80))
    assert tree.nodes == nodes
    assert tree.max_depth == 3
    whole = grow(markov_head(), 110, config.replace(entropy_stop=None), before=(10, 80))
    assert tree.tokens[0].tolist() == whole.tokens[0, :nodes].tolist()  # flat order: levels that were grown are alike


def test_whole_pool_may_be_kept() -> None:
    config = DraftConfig(total_token=1 + 3 + 2 * 9, depth=2, top_k=3)
    assert_well_formed(grow(peaky_head(2), 7, config))


def test_top_k_beyond_the_draft_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="top_k=25 is more than the draft vocabulary of 24 tokens"):
        Drafter(peaky_head(0), DraftConfig(total_token=5, depth=1, top_k=25))
