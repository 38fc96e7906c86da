"""The drafter's rows: what is fed in pieces equals what is fed at once, and nothing leaks between requests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle_mars.config import DraftConfig
from eagle_mars.draft import drafter as drafter_module
from eagle_mars.draft.drafter import Drafter
from eagle_mars.draft.head import Head
from eagle_mars.tree import DraftTree
from tests.draft.heads import random_head, random_rows

CONFIG = DraftConfig(total_token=16, depth=3, top_k=4)
HEADS = {
    "eagle3": lambda: random_head("eagle3"),
    "eagle3-full": lambda: random_head("eagle3", draft_vocab_size=60),
    "eagle1": lambda: random_head("eagle1", fc_bias=True),
    "eagle1-two-layers": lambda: random_head("eagle1", num_layers=2, qkv_bias=True),
}


@pytest.fixture(params=HEADS)
def head(request: pytest.FixtureRequest) -> Head:
    return HEADS[request.param]()


def assert_same(one: DraftTree, other: DraftTree) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    # fp32 matmuls over another number of rows may round differently; logits here reach a few tens.
    torch.testing.assert_close(one.draft_logprob, other.draft_logprob, atol=1e-4, rtol=1e-4)


def tree_after(
    head: Head, features: Tensor, tokens: Tensor, pieces: list[int], config: DraftConfig = CONFIG
) -> DraftTree:
    """Feed the rows piece by piece, growing a tree after each, as decoding does; return the last tree."""
    drafter = Drafter(head, config, batch=tokens.shape[0])
    for piece, following in zip(features.split(pieces, dim=1), tokens.split(pieces, dim=1), strict=True):
        drafter.extend(piece, following)
        tree = drafter.grow(following[:, -1])
    return tree


@pytest.mark.parametrize("pieces", [[1, 22], [9, 1, 4, 9], [22, 1], [1] * 23])
def test_rows_fed_in_pieces_equal_rows_fed_at_once(head: Head, pieces: list[int]) -> None:
    features, tokens = random_rows(head, 23)
    assert_same(tree_after(head, features, tokens, pieces), tree_after(head, features, tokens, [23]))


def test_long_prompts_are_fed_in_chunks(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    features, tokens = random_rows(head, 23)
    whole = tree_after(head, features, tokens, [23])
    monkeypatch.setattr(drafter_module, "_CHUNK", 5)
    assert_same(tree_after(head, features, tokens, [23]), whole)


def test_a_growing_buffer_keeps_its_rows(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    features, tokens = random_rows(head, 40)
    whole = tree_after(head, features, tokens, [40])
    monkeypatch.setattr(drafter_module, "HEADROOM", 0)
    assert_same(tree_after(head, features, tokens, [2] * 20), whole)


def test_a_cycle_allocates_no_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head()
    allocations = []
    allocate = head.allocate
    monkeypatch.setattr(head, "allocate", lambda batch, capacity: allocations.append(1) or allocate(batch, capacity))
    features, tokens = random_rows(head, 100)
    tree_after(head, features, tokens, [20] + [2] * 40)
    assert len(allocations) == 1


@torch.no_grad()
def chain_logprobs(head: Head, features: Tensor, tokens: Tensor, chain: list[int]) -> list[float]:
    """Log-probability of each token of `chain` after the rows, one causal row after the other."""
    cache = head.allocate(1, 64)
    x, fed, result = head.fuse(features), tokens, []
    vocabulary = head.to_target(torch.arange(head.config.draft_vocab_size)).tolist()
    start = 0
    for token in chain:
        rows = fed.shape[1]
        positions = torch.arange(start, start + rows).unsqueeze(0)
        visible = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
        output = head(x, fed, positions, visible[None, None], cache, start)[:, -1:]
        result.append(head.logits(output)[0, 0].log_softmax(-1)[vocabulary.index(token)].item())
        x, fed, start = output, torch.tensor([[token]]), start + rows
    return result


def test_every_node_equals_a_causal_pass_over_its_path(head: Head) -> None:
    features, tokens = random_rows(head, 12)
    tree = tree_after(head, features, tokens, [7, 5])
    for path in tree.paths()[0]:
        expected = chain_logprobs(head, features, tokens, tree.tokens[0, path[1:]].tolist())
        torch.testing.assert_close(tree.draft_logprob[0, path[1:]], torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_sequences_of_a_batch_draft_as_alone(head: Head) -> None:
    features, tokens = random_rows(head, 14, batch=3)
    together = tree_after(head, features, tokens, [9, 2, 3])
    for row in range(3):
        alone = tree_after(head, features[row : row + 1], tokens[row : row + 1], [9, 2, 3])
        assert torch.equal(together.tokens[row], alone.tokens[0])
        assert torch.equal(together.parents[row], alone.parents[0])
        assert torch.equal(together.ancestors[row], alone.ancestors[0])


def test_drafters_on_one_head_may_interleave(head: Head) -> None:
    first, second = random_rows(head, 20, seed=5), random_rows(head, 20, seed=6)
    one, other = Drafter(head, CONFIG), Drafter(head, CONFIG.replace(total_token=6))
    for start, end in [(0, 11), (11, 12), (12, 20)]:
        one.extend(first[0][:, start:end], first[1][:, start:end])
        other.extend(second[0][:, start:end], second[1][:, start:end])
        one_tree, other_tree = one.grow(first[1][:, end - 1]), other.grow(second[1][:, end - 1])
    assert_same(one_tree, tree_after(head, *first, [11, 1, 8]))
    assert_same(other_tree, tree_after(head, *second, [11, 1, 8], CONFIG.replace(total_token=6)))


def test_growing_again_gives_the_same_tree(head: Head) -> None:
    features, tokens = random_rows(head, 9)
    drafter = Drafter(head, CONFIG)
    drafter.extend(features, tokens)
    assert_same(drafter.grow(tokens[:, -1]), drafter.grow(tokens[:, -1]))
    assert drafter.rows == 9


def test_growing_before_the_prompt_is_a_programming_error() -> None:
    with pytest.raises(RuntimeError, match="extend must be called"):
        Drafter(random_head(), CONFIG).grow(torch.tensor([1]))


def test_a_cycle_reads_nothing_back_from_the_device() -> None:
    """Fake tensors have no values: an `.item()`, or a branch on one, would raise."""
    head = random_head()
    features, tokens = random_rows(head, 9)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        drafter = Drafter(head, CONFIG)
        drafter.extend(mode.from_tensor(features), mode.from_tensor(tokens))
        tree = drafter.grow(mode.from_tensor(tokens[:, -1]))
        drafter.extend(mode.from_tensor(features[:, :2]), mode.from_tensor(tokens[:, :2]))
    assert tree.ancestors.shape == (1, 16, 16)
