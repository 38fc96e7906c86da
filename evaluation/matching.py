"""Options under which different rules do comparably much: equal firing rate of the margins, equal acceptance of rules.

Without that, a table of rules compares thresholds that nobody chose alike.
"""

from __future__ import annotations

from statistics import fmean

import torch
from pydantic import BaseModel, ConfigDict

from eagle_mars.config import VerifyConfig
from eagle_mars.verify.margins import fires, matching_gap
from evaluation.watch import Replay

REFERENCE = "mars θ .9"
_SCALES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 10 / 3, 5.0, 8.0, 12.0)
_DELTAS = (0.05, 0.1, 0.125, 0.15, 0.175, 0.2, 0.225, 0.25, 0.275, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8, 1.0)
_RHOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.275, 0.3, 0.325, 0.35, 0.4, 0.45, 0.475, 0.5, 0.55, 0.6, 0.7, 0.8)


class Matched(BaseModel):
    """Matched options and what they were matched on.

    gap_for_theta_90, gap_for_theta_96: nats at which `logit-gap` fires as often as the ratio at theta .9 and .96.
    delta, rho, epsilon, alpha: options of the comparators under which they accept, on the trees of strict runs, as
    many drafts per cycle as `mars` at theta .9 (`accepted`: theirs and the reference's).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float
    cycles: int
    nodes: int
    firing_rate_theta_90: float
    firing_rate_theta_96: float
    gap_for_theta_90: float
    gap_for_theta_96: float
    delta: float
    rho: float
    epsilon: float
    alpha: float
    accepted: dict[str, float]


def candidates(temperature: float) -> dict[str, VerifyConfig]:
    """What `Replay` has to try."""
    tried = {REFERENCE: VerifyConfig(theta=0.9)}
    tried |= {f"delta {delta}": VerifyConfig(rule="topk-delta", delta=delta) for delta in _DELTAS}
    tried |= {f"rho {rho}": VerifyConfig(rule="prob-ratio", rho=rho) for rho in _RHOS}
    if temperature > 0:  # `typical` is greedy at T = 0
        tried |= {f"scale {scale}": _typical(scale) for scale in _SCALES}
    return tried


def choose(replay: Replay, temperature: float) -> Matched:
    """The candidates nearest to the reference."""
    mean = {name: fmean(counts) for name, counts in replay.accepted.items()}
    z1, z2 = torch.tensor(replay.z1), torch.tensor(replay.z2)

    def nearest(kind: str, values: tuple[float, ...]) -> float:
        return min(values, key=lambda value: abs(mean[f"{kind} {value}"] - mean[REFERENCE]))

    delta, rho = nearest("delta", _DELTAS), nearest("rho", _RHOS)
    kept = [REFERENCE, f"delta {delta}", f"rho {rho}"]
    scale = 1.0
    if temperature > 0:
        scale = nearest("scale", _SCALES)
        kept.append(f"scale {scale}")
    typical = _typical(scale)
    return Matched(
        temperature=temperature,
        cycles=len(replay.accepted[REFERENCE]),
        nodes=len(replay.z1),
        firing_rate_theta_90=float(fires(z1, z2, theta=0.9).double().mean()),
        firing_rate_theta_96=float(fires(z1, z2, theta=0.96).double().mean()),
        gap_for_theta_90=matching_gap(0.9, z1, z2),
        gap_for_theta_96=matching_gap(0.96, z1, z2),
        delta=delta,
        rho=rho,
        epsilon=typical.epsilon,
        alpha=typical.alpha,
        accepted={name: round(mean[name], 3) for name in kept},
    )


def _typical(scale: float) -> VerifyConfig:
    """Medusa's two thresholds, scaled together, each up to 1; there, p(x) > exp(-H), the rule is at its strictest."""
    return VerifyConfig(rule="typical", epsilon=min(1.0, 0.09 * scale), alpha=min(1.0, 0.3 * scale))
