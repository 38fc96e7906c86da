"""Converting one margin into the other on measured logits: theta (the paper's ratio) and gap (nats).

theta allows a gap of (1 - theta) * z1 nats, so a conversion holds for a model and a kind of text, never in general.
"""

from __future__ import annotations

from torch import Tensor

from eagle_mars.errors import ConfigError


def fires(z1: Tensor, z2: Tensor, *, theta: float | None = None, gap: float | None = None) -> Tensor:
    """bool, the shape of z1 and z2: where the two best raw logits have low margin under theta, or else under gap."""
    if theta is not None and gap is None:
        return (z1 > 0) & (z2.double() > theta * z1.double())
    if gap is not None and theta is None:
        return z1.double() - z2.double() < gap
    raise ConfigError("Give either theta or gap.")


def matching_gap(theta: float, z1: Tensor, z2: Tensor) -> float:
    """The gap in nats that fires as often as `theta` on the measured pairs z1 >= z2 (any shape, at least two pairs)."""
    wanted = int(fires(z1, z2, theta=theta).sum())
    return _threshold((z1.double() - z2.double()).flatten(), wanted)


def matching_theta(gap: float, z1: Tensor, z2: Tensor) -> float:
    """The theta that fires as often as `gap` on the measured pairs; 1.0 where no theta fires so seldom."""
    wanted = int(fires(z1, z2, gap=gap).sum())
    distance = (1 - z2.double() / z1.double()).masked_fill(z1 <= 0, float("inf")).flatten()
    return 1 - min(_threshold(distance, wanted), 1.0)


def _threshold(distances: Tensor, count: int) -> float:
    """A number that exceeds the `count` smallest distances and none of the others, ties apart."""
    if distances.numel() < 2:
        raise ConfigError("Converting a margin needs at least two measured positions; measure on more text.")
    ranked = distances.sort().values
    if count == 0:
        return 0.0
    if count == len(ranked):
        return float(ranked[-1]) * (1 + 1e-9) + 1e-9
    return float(ranked[count - 1] + ranked[count]) / 2
