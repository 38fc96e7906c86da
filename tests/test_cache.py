from __future__ import annotations

import pytest
import torch

from eagle_mars.cache import CacheLayout, TreeCache
from eagle_mars.errors import ContextLengthError, UnsupportedTargetError

LAYERS, HEADS, DIM = 3, 2, 4


def make(batch: int = 1, max_length: int = 64, capacity: int = 16) -> TreeCache:
    layout = CacheLayout(HEADS, DIM, torch.float32, (torch.device("cpu"),) * LAYERS)
    return TreeCache(layout, batch, max_length, capacity)


def append(cache: TreeCache, values: list[float]) -> list[torch.Tensor]:
    """Write one row per value (the same in every head) into every layer; returns the keys of each layer."""
    rows = torch.tensor(values).view(1, 1, -1, 1).expand(cache.batch, HEADS, -1, DIM)
    return [cache.update(rows + 100 * layer, -rows, layer)[0] for layer in range(LAYERS)]


def contents(cache: TreeCache, layer: int = 0) -> list[float]:
    keys, values = cache._views[layer]
    assert torch.equal(keys[..., : cache.committed, :] - 100 * layer, -values[..., : cache.committed, :])
    return (keys[0, 0, : cache.committed, 0] - 100 * layer).tolist()


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 2, 5], [0, 1, 3, 4], [0, 5]])
def test_commit_keeps_the_path_in_every_layer(path: list[int]) -> None:
    cache = make()
    append(cache, [1.0, 2.0])
    cache.commit()
    append(cache, [10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
    cache.commit([path])
    for layer in range(LAYERS):
        assert contents(cache, layer) == [1.0, 2.0] + [10.0 + i for i in path]
    assert cache.get_seq_length() == 2 + len(path)


def test_rows_that_were_not_committed_are_overwritten() -> None:
    cache = make()
    append(cache, [1.0, 2.0, 3.0])
    cache.commit([[0]])
    append(cache, [7.0])
    cache.commit()
    assert contents(cache) == [1.0, 7.0]


def test_each_sequence_commits_its_own_path() -> None:
    cache = make(batch=2)
    append(cache, [1.0, 2.0, 3.0, 4.0])
    cache.commit([[0, 3], [0, 1]])
    keys = cache._views[0][0]
    assert keys[:, 0, :2, 0].tolist() == [[1.0, 4.0], [1.0, 2.0]]


def test_growth_keeps_what_was_written() -> None:
    cache = make(capacity=4)
    append(cache, [1.0, 2.0, 3.0])
    cache.commit()
    cache.reserve(20)
    append(cache, [float(i) for i in range(20)])
    cache.commit()
    assert contents(cache) == [1.0, 2.0, 3.0, *map(float, range(20))]
    assert contents(cache, 2) == contents(cache)


def test_growth_inside_a_forward_keeps_uncommitted_rows() -> None:
    cache = make(capacity=4)
    append(cache, [1.0, 2.0, 3.0])
    append(cache, [4.0, 5.0, 6.0])
    cache.commit()
    assert contents(cache) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_overflow_is_refused_before_anything_is_written() -> None:
    cache = make(max_length=8, capacity=8)
    append(cache, [1.0] * 6)
    cache.commit()
    with pytest.raises(ContextLengthError, match="at most 8 rows and this step needs 9"):
        cache.reserve(3)
    with pytest.raises(ContextLengthError):
        append(cache, [2.0, 2.0, 2.0])
    assert contents(cache) == [1.0] * 6


def test_reset_makes_it_reusable() -> None:
    cache = make()
    append(cache, [1.0] * 9)
    cache.commit()
    cache.reset()
    append(cache, [5.0])
    cache.commit()
    assert contents(cache) == [5.0]


def test_other_shapes_than_the_config_promised_are_refused() -> None:
    with pytest.raises(UnsupportedTargetError, match="promises 2 heads of 4"):
        make().update(torch.zeros(1, HEADS + 1, 1, DIM), torch.zeros(1, HEADS + 1, 1, DIM), 0)


def test_tree_mask_shows_the_prefix_and_the_ancestors_only() -> None:
    cache = make()
    first = torch.tensor([[[True, False], [True, True]]])
    second = torch.tensor([[[True, False], [False, True]]])
    append(cache, [0.0] * 3)
    cache.commit()
    for ancestors in (first, second):
        mask = cache.tree_mask(ancestors)
        assert mask.shape == (1, 1, 2, cache.committed + 2)
        assert mask[..., : cache.committed].all()
        assert torch.equal(mask[:, 0, :, cache.committed :], ancestors)
        append(cache, [0.0, 0.0])
        cache.commit([[0, 1]])


def ragged(lengths: list[int], places: int = 3) -> TreeCache:
    """A cache whose sequences came one by one; sequence b holds 10 * b, 10 * b + 1, ..."""
    cache = make(batch=places)
    cache.reset(0)
    for row, length in enumerate(lengths):
        single = make()
        append(single, [10.0 * row + i for i in range(length)])
        single.commit()
        cache.join(single)
    return cache


def append_each(cache: TreeCache, values: list[list[float]]) -> None:
    rows = torch.tensor(values).view(len(values), 1, -1, 1).expand(-1, HEADS, -1, DIM)
    for layer in range(LAYERS):
        cache.update(rows + 100 * layer, -rows, layer)


def held(cache: TreeCache, layer: int = 2) -> list[list[float]]:
    keys = cache._views[layer][0] - 100 * layer
    return [keys[row, 0, :length, 0].tolist() for row, length in enumerate(cache.lengths)]


def test_sequences_of_different_lengths_grow_behind_their_own_rows() -> None:
    cache = ragged([3, 1, 2])
    append_each(cache, [[50.0, 51.0, 52.0], [60.0, 61.0, 62.0], [70.0, 71.0, 72.0]])
    cache.commit([[0, 2], [0], [0, 1, 2]])
    assert held(cache) == [[0.0, 1.0, 2.0, 50.0, 52.0], [10.0, 60.0], [20.0, 21.0, 70.0, 71.0, 72.0]]
    append_each(cache, [[1.5], [2.5], [3.5]])
    cache.commit()
    assert [rows[-1] for rows in held(cache)] == [1.5, 2.5, 3.5]


def test_a_sequence_leaves_and_another_takes_its_place() -> None:
    cache = ragged([3, 1, 2])
    cache.drop(0)
    assert held(cache) == [[20.0, 21.0], [10.0]]
    single = make()
    append(single, [float(i) for i in range(30)])  # longer than the cache was: it grows
    single.commit()
    cache.join(single)
    assert held(cache) == [[20.0, 21.0], [10.0], [float(i) for i in range(30)]]
    with pytest.raises(RuntimeError, match="drop a sequence"):
        cache.join(single)


def test_what_lies_behind_a_shorter_sequence_is_hidden_and_finite() -> None:
    cache = ragged([3, 1])
    ancestors = torch.tensor([[[True, False], [True, True]]]).expand(2, 2, 2)
    mask = cache.tree_mask(ancestors)
    assert mask.shape == (2, 1, 2, 5)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    keys, values = cache.update(torch.ones(2, HEADS, 2, DIM), torch.ones(2, HEADS, 2, DIM), 0)
    assert keys.shape[2] == 5
    assert values.isfinite().all()
    assert cache.positions(torch.tensor([[0, 1], [0, 1]])).tolist() == [[3, 4], [1, 2]]


def test_nothing_of_who_left_reaches_who_comes() -> None:
    """A response may leave because its keys are NaN; those that follow in its place read, masked, what it has left."""
    nan = float("nan")
    cache = ragged([1, 6, 2])
    append_each(cache, [[5.0, 5.0], [nan, nan], [5.0, 5.0]])
    cache.commit([[0], [0, 1], [0]])
    cache.drop(1)  # the last one moves into its place
    cache.drop(1)
    single = make()
    append(single, [7.0])
    single.commit()
    cache.join(single)
    assert held(cache) == [[0.0, 5.0], [7.0]]
    assert all(keys.isfinite().all() and values.isfinite().all() for keys, values in cache._views)


def test_a_sequence_that_is_too_long_changes_nothing() -> None:
    cache, long = ragged([3]), make(max_length=200)
    append(long, [1.0] * 100)
    long.commit()
    with pytest.raises(ContextLengthError):
        cache.join(long)
    assert held(cache) == [[0.0, 1.0, 2.0]]
