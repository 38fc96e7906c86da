"""Warping against transformers' own processors, coins, and the draw of one token."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_mars.config import SamplingConfig
from eagle_mars.errors import ConfigError
from eagle_mars.sampling import CoinStream, History, SamplingPlan, draw, inverse_cdf, penalise, warp
from eagle_mars.tree import DraftTree

CONFIGS = [
    SamplingConfig(temperature=1),
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1, top_k=5),
    SamplingConfig(temperature=1, top_k=500),
    SamplingConfig(temperature=1, top_p=0.8),
    SamplingConfig(temperature=1, top_p=1e-9),
    SamplingConfig(temperature=1.4, top_k=12, top_p=0.6),
    SamplingConfig(temperature=1, min_p=0.2),
    SamplingConfig(temperature=2, top_k=20, top_p=0.95, min_p=0.1),
]


def transformers_warp(logits: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """[M, V] through transformers' processors, in the order in which `generate` puts them."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(float(config.temperature))])
    if config.top_k:
        processors.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        processors.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        processors.append(MinPLogitsWarper(config.min_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_warp_equals_transformers(config: SamplingConfig) -> None:
    logits = torch.randn(2, 40, 97, generator=torch.Generator().manual_seed(0)) * 4
    expected = torch.stack([transformers_warp(row, config) for row in logits])
    assert torch.equal(warp(logits, SamplingPlan.compile([config] * 2)), expected)


def test_rows_of_a_batch_keep_their_own_options() -> None:
    logits = torch.randn(len(CONFIGS), 6, 97, generator=torch.Generator().manual_seed(1)) * 4
    mixed = warp(logits, SamplingPlan.compile(CONFIGS))
    for row, config in enumerate(CONFIGS):
        assert torch.equal(mixed[row : row + 1], warp(logits[row : row + 1], SamplingPlan.compile([config])))


def test_a_nucleus_wider_than_the_first_ranking() -> None:
    """Nearly flat rows, whose nucleus exceeds the tokens that are ranked first, beside a peaked one."""
    logits = torch.randn(1, 3, 1500, generator=torch.Generator().manual_seed(9))
    logits[0, 2, 7] = 30.0
    config = SamplingConfig(temperature=1, top_p=0.7)
    expected = transformers_warp(logits[0], config)
    assert torch.equal(warp(logits, SamplingPlan.compile([config]))[0], expected)
    assert expected.isfinite().sum(-1).tolist()[2] == 1
    assert expected.isfinite().sum(-1).tolist()[0] > 256


def test_tokens_that_tie_at_the_cut_are_kept_together() -> None:
    logits = torch.tensor([[[3.0, 1.0, 1.0, 1.0, 0.0]]])
    for config in (SamplingConfig(temperature=1, top_k=2), SamplingConfig(temperature=1, top_p=0.8)):
        warped = warp(logits, SamplingPlan.compile([config]))
        assert warped.isfinite().tolist() == [[[True, True, True, True, False]]]


def test_repetition_penalty_equals_transformers_and_sees_the_ancestors_only() -> None:
    logits = torch.randn(1, 4, 11, generator=torch.Generator().manual_seed(2))
    tree = DraftTree.from_parents(torch.tensor([[3, 5, 6, 5]]), torch.tensor([[-1, 0, 0, 1]]))
    history = History(prompt=torch.tensor([[1, 2, -1]]), generated=torch.tensor([[4, 4]]))
    plan = SamplingPlan.compile([SamplingConfig(repetition_penalty=1.3)])
    seen = [[1, 2, 4, 3], [1, 2, 4, 3, 5], [1, 2, 4, 3, 6], [1, 2, 4, 3, 5, 5]]
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    expected = [processor(torch.tensor([ids]), logits[:, node].clone()) for node, ids in enumerate(seen)]
    assert torch.equal(penalise(logits, plan, history, tree), torch.stack(expected, dim=1))


def test_presence_and_frequency_count_the_response_and_not_the_prompt() -> None:
    tree = DraftTree.from_parents(torch.tensor([[3, 5, 5]]), torch.tensor([[-1, 0, 1]]))
    history = History(prompt=torch.tensor([[1, 1]]), generated=torch.tensor([[4, 4, -1]]))
    plan = SamplingPlan.compile([SamplingConfig(presence_penalty=1.0, frequency_penalty=0.5)])
    got = penalise(torch.zeros(1, 3, 6), plan, history, tree)[0]
    assert got.tolist() == [[0, 0, 0, -1.5, -2, 0], [0, 0, 0, -1.5, -2, -1.5], [0, 0, 0, -1.5, -2, -2]]


def test_a_penalty_without_history_is_refused() -> None:
    plan = SamplingPlan.compile([SamplingConfig(repetition_penalty=1.3)])
    with pytest.raises(ConfigError, match="pass history="):
        draw(torch.zeros(1, 4), plan, None)


def test_no_copy_where_there_is_nothing_to_do() -> None:
    logits = torch.randn(1, 3, 8)
    plan = SamplingPlan.compile([SamplingConfig(temperature=1)])
    assert warp(penalise(logits, plan, None), plan) is logits


def test_greedy_draw_takes_the_lowest_id_on_ties_and_needs_no_coin() -> None:
    plan = SamplingPlan.compile([SamplingConfig()])
    assert draw(torch.tensor([[0.0, 2.0, 2.0]]), plan, None).tolist() == [1]


def test_sampling_without_a_coin_is_refused() -> None:
    with pytest.raises(ConfigError, match="CoinStream"):
        draw(torch.zeros(1, 4), SamplingPlan.compile([SamplingConfig(temperature=1)]), None)


def test_draw_inverts_the_cumulative_distribution() -> None:
    probabilities = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.125], dtype=torch.float64)
    coins = (torch.arange(64, dtype=torch.float64) + 0.5) / 64  # amid the cells: float32 logs move their borders
    drawn = inverse_cdf(probabilities.log().float().expand(64, -1), coins)
    assert (drawn.bincount(minlength=5) / 64).tolist() == probabilities.tolist()
    assert drawn.tolist() == sorted(drawn.tolist())


def test_draw_from_a_residual_without_mass_falls_back_to_the_distribution() -> None:
    warped = torch.tensor([[0.0, float("-inf")]])
    assert inverse_cdf(warped, torch.tensor([0.5]), torch.tensor([[True, False]])).tolist() == [0]


def test_a_rows_coins_depend_on_its_seed_alone() -> None:
    together, alone = CoinStream([7, 8]), CoinStream([8])
    assert torch.equal(together.single()[1:], alone.single())
    both, one = together.next(5), alone.next(5)
    assert torch.equal(both.accept[1:], one.accept)
    assert torch.equal(both.draw[1:], one.draw)
    assert not torch.equal(both.accept[0], both.accept[1])
    assert CoinStream([7]).seeds == [7]


def test_an_absent_seed_is_drawn_and_can_be_replayed() -> None:
    stream = CoinStream([None])
    assert torch.equal(stream.next(4).accept, CoinStream(stream.seeds).next(4).accept)
