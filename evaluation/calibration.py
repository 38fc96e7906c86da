"""Choosing a margin for given prompts and a given pair: one strict run logged, every candidate replayed on it, the best
one that keeps to a budget confirmed by a paired run.

The replay asks at every tree of the strict run what a candidate would have accepted. That is exact for the first
relaxation of an answer and an estimate afterwards, since a relaxed text goes another way: hence the confirming run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist, fmean, stdev

import torch
from torch import Tensor

from eagle_mars import EaModel, GenerationResult, SamplingConfig, VerifyConfig
from eagle_mars.config import DraftConfig, Margin
from eagle_mars.engine import Request
from eagle_mars.errors import ConfigError
from eagle_mars.verify import verify as plain_verify
from eagle_mars.verify.margins import fires, matching_gap, matching_theta
from evaluation.metrics import Array, Cell, interval, mean, ratio
from evaluation.nodes import LoggedNode, NodeLog, decode
from evaluation.rules import log_probabilities
from evaluation.watch import Replay

THETAS = (0.8, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99)
GAPS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
EXACT = VerifyConfig(rule="exact")
_ALPHA, _POWER = 0.05, 0.8  # one-sided level and power, as in VERIFICATION section 6


@dataclass(frozen=True)
class Setup:
    """What all runs of a calibration share. seed: of the first prompt; the next one's is one more."""

    draft: DraftConfig
    max_new_tokens: int
    temperature: float
    seed: int

    def sampling(self, index: int) -> SamplingConfig:
        return SamplingConfig(temperature=self.temperature, seed=self.seed + index)


@dataclass(frozen=True)
class Replayed:
    """The strict run of one prompt: its nodes, and what each candidate would have done at its trees."""

    nodes: list[LoggedNode]
    replay: Replay


@dataclass(frozen=True)
class Prediction:
    """What the replay says of a candidate. tau: tokens per cycle. regret: nats per token. fires: share of walked nodes
    with a low margin; None for a rule without a margin."""

    name: str
    verify: VerifyConfig
    tau: Cell
    regret: Cell
    fires: float | None


@dataclass(frozen=True)
class Confirmation:
    """Strict against the chosen rule, paired by prompt.

    tau: of both. tau_gain, speed_up: ratios. log_probability: the target's mean log-probability of the emitted text, of
    both. quality: its mean difference, rule minus strict, nats per token. detectable: the difference that so many
    prompts find with 80 % power at a one-sided 5 %; power: the chance to show non-inferiority at the margin if nothing
    is lost; None with fewer than two prompts.
    """

    prompts: int
    tau: tuple[Cell, Cell]
    tau_gain: Cell
    speed_up: Cell
    relaxed_per_1000: Cell
    length_ratio: Cell
    log_probability: tuple[Cell, Cell]
    quality: Cell
    margin: float
    detectable: float | None
    power: float | None

    @property
    def non_inferior(self) -> bool | None:
        """Whether the whole interval of the loss lies inside the margin; None where there is no interval."""
        return None if self.quality.low is None else self.quality.low > -self.margin


def candidates(temperature: float) -> dict[str, VerifyConfig]:
    """Everything that is replayed: the margins that may be chosen, and other rules to compare with."""
    found = {f"mars θ = {theta:g}": VerifyConfig(theta=theta) for theta in THETAS}
    found |= {f"mars gap = {gap:g}": VerifyConfig(margin="logit-gap", gap=gap) for gap in GAPS}
    found |= {"topk-delta": VerifyConfig(rule="topk-delta"), "prob-ratio": VerifyConfig(rule="prob-ratio")}
    if temperature > 0:
        found |= {"typical": VerifyConfig(rule="typical"), "mars-paper θ = 0.9": VerifyConfig(rule="mars-paper")}
    return found


def replay(
    ea: EaModel, prompts: Sequence[Tensor], setup: Setup, advance: Callable[[], None] = lambda: None
) -> list[Replayed]:
    """Decode every prompt [1, L] strictly and log it."""
    found = []
    for index, prompt in enumerate(prompts):
        tried = Replay(candidates(setup.temperature), setup.sampling(index), ea.special_ids)
        log = NodeLog(tried)
        decode(ea, prompt, _request(ea, setup, EXACT, index), log)
        found.append(Replayed(log.nodes, tried))
        advance()
    return found


def predict(runs: Sequence[Replayed], temperature: float) -> list[Prediction]:
    """The candidates, in their order. Raises ConfigError if the strict run had no cycle to replay."""
    runs = [run for run in runs if run.replay.accepted]
    if not runs:
        raise ConfigError("no prompt needed a draft tree, so there is nothing to replay; raise --max-new-tokens.")
    z1, z2 = best_logits(runs)
    found = []
    for name, config in candidates(temperature).items():
        tokens = [float(sum(n + 1 for n in run.replay.accepted[name])) for run in runs]
        cycles = [float(len(run.replay.accepted[name])) for run in runs]
        regret = [sum(run.replay.regret[name]) for run in runs]
        rate = _firing_rate(config, z1, z2) if config.rule in ("mars", "mars-paper") else None
        found.append(
            Prediction(name, config, interval([tokens, cycles], ratio), interval([regret, tokens], ratio), rate)
        )
    return found


def choose(predictions: Sequence[Prediction], margin: Margin, budget: float) -> Prediction:
    """The `mars` candidate with the highest predicted tau whose predicted regret keeps to `budget` nats per token.

    Raises ConfigError if none does.
    """
    own = [p for p in predictions if p.verify.rule == "mars" and p.verify.margin == margin]
    fitting = [p for p in own if _value(p.regret) <= budget]
    if not fitting:
        least = min(_value(p.regret) for p in own)
        raise ConfigError(
            f"no {margin} candidate keeps to {budget:g} nats per token; the least is {least:.3g}: raise --budget, or "
            "use rule='exact'."
        )
    return max(fitting, key=lambda p: (_value(p.tau), -_value(p.regret)))


def equivalents(config: VerifyConfig, z1: Tensor, z2: Tensor) -> dict[str, float]:
    """The chosen margin in the other unit, matched on the measured nodes, and what it allows at the median z1."""
    if config.margin == "logit-gap":
        assert config.gap is not None  # VerifyConfig insists
        return {"gap": config.gap, "theta that fires as often": matching_theta(config.gap, z1, z2)}
    assert config.theta is not None  # candidates have one
    return {
        "theta": config.theta,
        "gap that fires as often": matching_gap(config.theta, z1, z2),
        "gap allowed at the median z1": (1 - config.theta) * float(z1.median()),
        "gap allowed at the largest z1": (1 - config.theta) * float(z1.max()),
    }


def confirm(
    ea: EaModel,
    prompts: Sequence[Tensor],
    setup: Setup,
    config: VerifyConfig,
    margin: float,
    advance: Callable[[], None] = lambda: None,
) -> Confirmation:
    """Decode every prompt strictly and with the rule, in turns, with the same coins. margin: nats per token."""
    pairs: list[tuple[GenerationResult, GenerationResult]] = []
    texts: list[tuple[float, float]] = []
    for index, prompt in enumerate(prompts):
        order = (EXACT, config) if index % 2 == 0 else (config, EXACT)  # drift of the machine meets both alike
        results = {c: decode(ea, prompt, _request(ea, setup, c, index), plain_verify) for c in order}
        pairs.append((results[EXACT], results[config]))
        row = prompt[0].tolist()
        texts.append(
            (fmean(log_probabilities(ea, row, results[EXACT])), fmean(log_probabilities(ea, row, results[config])))
        )
        advance()
    strict, relaxed = zip(*pairs, strict=True)
    losses = [after - before for before, after in texts]
    power = _power(losses, margin)
    return Confirmation(
        prompts=len(prompts),
        tau=(_tau(strict), _tau(relaxed)),
        tau_gain=interval([_yield(relaxed), _cycles(relaxed), _yield(strict), _cycles(strict)], _ratio_of_ratios),
        speed_up=interval([[b.tokens_per_second / a.tokens_per_second for a, b in pairs]], mean),
        relaxed_per_1000=interval([[1e3 * r.relaxed for r in relaxed], [r.new_tokens for r in relaxed]], ratio),
        length_ratio=interval([[r.new_tokens for r in relaxed], [r.new_tokens for r in strict]], ratio),
        log_probability=(interval([[a for a, _ in texts]], mean), interval([[b for _, b in texts]], mean)),
        quality=interval([losses], mean),
        margin=margin,
        detectable=power and power[0],
        power=power and power[1],
    )


def best_logits(runs: Sequence[Replayed]) -> tuple[Tensor, Tensor]:
    """z1 and z2 of every walked node of the strict run."""
    return torch.tensor([z for r in runs for z in r.replay.z1]), torch.tensor([z for r in runs for z in r.replay.z2])


def rejections(runs: Sequence[Replayed], config: VerifyConfig) -> Mapping[str, int]:
    """Tested nodes of the strict run: all, low margin under `config`, of these rejected, of these with the runner-up
    drafted, which is what the rule can rescue."""
    nodes = [node for run in runs for node in run.nodes]
    z1, z2 = torch.tensor([n.z1 for n in nodes]), torch.tensor([n.z2 for n in nodes])
    low = [node for node, fired in zip(nodes, _fires(config, z1, z2).tolist(), strict=True) if fired]
    rejected = [node for node in low if node.rejected]
    return {
        "tested": len(nodes),
        "low margin": len(low),
        "rejected": len(rejected),
        "runner-up drafted": sum(node.runner_up for node in rejected),
    }


def _request(ea: EaModel, setup: Setup, config: VerifyConfig, index: int) -> Request:
    return Request(
        setup.max_new_tokens,
        draft=setup.draft,
        verify=config,
        sampling=setup.sampling(index),
        stop_ids=ea.stop_ids,
        special_ids=ea.special_ids,
    )


def _fires(config: VerifyConfig, z1: Tensor, z2: Tensor) -> Tensor:
    by_gap = config.margin == "logit-gap"
    return fires(z1, z2, theta=None if by_gap else config.theta, gap=config.gap if by_gap else None)


def _firing_rate(config: VerifyConfig, z1: Tensor, z2: Tensor) -> float:
    return float(_fires(config, z1, z2).double().mean())


def _power(losses: Sequence[float], margin: float) -> tuple[float, float] | None:
    """Detectable difference and power at the margin, by the normal approximation."""
    if len(losses) < 2:
        return None
    error, normal = stdev(losses) / sqrt(len(losses)), NormalDist()
    critical = normal.inv_cdf(1 - _ALPHA)
    return (critical + normal.inv_cdf(_POWER)) * error, normal.cdf(margin / error - critical) if error else 1.0


def _yield(results: Sequence[GenerationResult]) -> list[float]:
    return [float(sum(n + 1 for n in r.accepted_lengths)) for r in results]


def _cycles(results: Sequence[GenerationResult]) -> list[float]:
    return [float(r.cycles) for r in results]


def _tau(results: Sequence[GenerationResult]) -> Cell:
    return interval([_yield(results), _cycles(results)], ratio)


def _ratio_of_ratios(a: Array, b: Array, c: Array, d: Array, axis: int = -1) -> Array:
    return ratio(a, b, axis) / ratio(c, d, axis)


def _value(cell: Cell) -> float:
    assert cell.value is not None  # `interval` always has one
    return cell.value
