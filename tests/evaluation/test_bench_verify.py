"""The benchmark of verification: its naive walk is right, and it times nothing that disagrees."""

from __future__ import annotations

import pytest
import torch

from eagle_mars.config import SamplingConfig, VerifyConfig
from eagle_mars.sampling import CoinStream
from eagle_mars.verify import plan
from eagle_mars.verify.reference import verify_reference
from evaluation import bench_verify
from evaluation.bench_verify import DisagreementError, decision, inputs, measure, naive_walk


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_the_naive_walk_decides_as_the_reference(temperature: float) -> None:
    tree, logits = inputs(8, 14, 60, torch.float32, "cpu", seed=1)
    sampling = SamplingConfig(temperature=temperature)
    rows = plan(VerifyConfig(rule="exact"), sampling, vocab_size=60, batch=8)
    coins = CoinStream(range(8)).next(14)
    expected = decision(tree, logits, rows, coins, verify_reference)
    assert naive_walk(tree, logits, temperature, coins) == expected
    assert any(len(path) > 1 for path in expected[0])


def test_a_row_names_sizes_times_and_ratios() -> None:
    row = measure(2, 6, 50, torch.bfloat16, 0.0, "exact", "cpu", repeats=1, compiled=False)
    assert row["bytes"] == 2 * 6 * 50 * 2
    assert set(row["ms"]) == set(row["ratio_to_reading"]) == {"reference", "naive"}


def test_nothing_is_timed_after_a_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_verify, "naive_walk", lambda *_: ([[0]], [0]))
    with pytest.raises(DisagreementError, match="nothing is timed"):
        measure(2, 6, 50, torch.float32, 0.0, "exact", "cpu", repeats=1, compiled=False)
