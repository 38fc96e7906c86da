"""Conversions between theta and nats fire equally often on the logits that they were measured on."""

from __future__ import annotations

import pytest
import torch

from eagle_mars.errors import ConfigError
from eagle_mars.verify.margins import fires, matching_gap, matching_theta


def pairs() -> tuple[torch.Tensor, torch.Tensor]:
    best = torch.randn(4, 500, 2, generator=torch.Generator().manual_seed(0)) * 6 + 12
    ordered = best.sort(-1, descending=True).values
    return ordered[..., 0], ordered[..., 1]


@pytest.mark.parametrize("theta", [0.5, 0.8, 0.9, 0.96, 0.99999])
def test_the_gap_fires_as_often_as_theta(theta: float) -> None:
    z1, z2 = pairs()
    gap = matching_gap(theta, z1, z2)
    assert fires(z1, z2, gap=gap).sum() == fires(z1, z2, theta=theta).sum()


@pytest.mark.parametrize("gap", [0.0, 0.3, 1.0, 4.0])
def test_theta_fires_as_often_as_the_gap(gap: float) -> None:
    z1, z2 = pairs()
    theta = matching_theta(gap, z1, z2)
    assert fires(z1, z2, theta=theta).sum() == fires(z1, z2, gap=gap).sum()


def test_the_conversion_of_equal_logits_is_the_formula() -> None:
    """z1 = 20 everywhere: theta = .9 allows 2 nats."""
    z1 = torch.full((400,), 20.0)
    z2 = z1 - torch.arange(400) / 100
    assert matching_gap(0.9, z1, z2) == pytest.approx(2.0, abs=0.01)  # pairs lie .01 nat apart


def test_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="measure on more text"):
        matching_gap(0.9, torch.tensor([1.0]), torch.tensor([0.5]))
    with pytest.raises(ConfigError, match="either theta or gap"):
        fires(torch.tensor([1.0]), torch.tensor([0.5]))
