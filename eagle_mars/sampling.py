"""The target's distribution over the next token: penalties and warpers on rows, coins from a seed, the draw.

Order and meaning are transformers': penalties, then temperature -> top-k -> top-p -> min-p. Each truncation is a
cut-off on the tempered logit, so tokens that tie exactly at the cut are kept together (transformers keeps as many of
them as its sort happens to leave).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.config import SamplingConfig
from eagle_mars.errors import ConfigError
from eagle_mars.tree import DraftTree

_MINUS_INF = float("-inf")
_HEAD = 256  # tokens that are ranked first in search of a nucleus


@dataclass(frozen=True)
class SamplingPlan:
    """`SamplingConfig`s of a batch as [B] tensors, and what the host may branch on without reading the device."""

    greedy: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    draws: bool
    tempered: bool
    max_top_k: int
    all_top_k: bool
    nucleus: bool
    floors: bool
    penalises: bool

    @classmethod
    def compile(cls, configs: Sequence[SamplingConfig], device: torch.device | str = "cpu") -> SamplingPlan:
        """One config per row of the batch; done once per request, never inside a cycle."""

        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        sampled = [c for c in configs if not c.greedy]
        unwarped = SamplingConfig(temperature=1)
        warps = [unwarped if c.greedy else c for c in configs]
        return cls(
            greedy=column([c.greedy for c in configs], torch.bool),
            temperature=column([c.temperature for c in warps], torch.float32),
            top_k=column([c.top_k for c in warps], torch.int64),
            top_p=column([c.top_p for c in warps], torch.float64),
            min_p=column([c.min_p for c in warps], torch.float64),
            repetition=column([c.repetition_penalty for c in configs], torch.float32),
            presence=column([c.presence_penalty for c in configs], torch.float32),
            frequency=column([c.frequency_penalty for c in configs], torch.float32),
            draws=bool(sampled),
            tempered=any(c.temperature != 1 for c in sampled),
            max_top_k=max((c.top_k for c in sampled), default=0),
            all_top_k=all(c.top_k for c in sampled),
            nucleus=any(c.top_p < 1 for c in sampled),
            floors=any(c.min_p > 0 for c in sampled),
            penalises=any(c.penalises for c in configs),
        )

    @property
    def batch(self) -> int:
        return self.greedy.shape[0]

    @property
    def truncates(self) -> bool:
        return bool(self.max_top_k) or self.nucleus or self.floors


@dataclass(frozen=True)
class History:
    """Token ids before the root, which penalties look at: prompt [B, P] and generated [B, G] int64, padded with -1."""

    prompt: Tensor
    generated: Tensor


def penalise(logits: Tensor, plan: SamplingPlan, history: History | None, tree: DraftTree | None = None) -> Tensor:
    """[B, M, V] float32 logits after repetition, frequency and presence penalties; `logits` itself when none is set.

    With a tree, row m also counts the tokens of node m's ancestors, the root and m itself: they are generated tokens of
    the path on which m's logits hold. Without one, M is any number of rows that share the history.
    """
    if not plan.penalises:
        return logits
    if history is None:
        raise ConfigError("A penalty is set but there is no history to count; pass history=History(prompt, generated).")
    counts = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    _count(counts, history.generated.unsqueeze(1))
    if tree is not None:
        _count(counts, torch.where(tree.ancestors, tree.tokens.unsqueeze(1), -1))
    seen = counts.clone()
    _count(seen, history.prompt.unsqueeze(1))
    repetition, frequency, presence = (x.view(-1, 1, 1) for x in (plan.repetition, plan.frequency, plan.presence))
    z = logits.float()
    z = torch.where(seen > 0, torch.where(z < 0, z * repetition, z / repetition), z)
    return z - frequency * counts - presence * (counts > 0)


def _count(counts: Tensor, ids: Tensor) -> None:
    ids = ids.expand(-1, counts.shape[1], -1)
    counts.scatter_add_(-1, ids.clamp(min=0), (ids >= 0).float())


def temper(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """[B, M, V] -> float32 logits at each row's temperature (greedy rows: 1); no copy where there is nothing to do."""
    z = logits.float()
    return z / plan.temperature.view(-1, 1, 1) if plan.tempered else z


def cutoff(tempered: Tensor, plan: SamplingPlan) -> Tensor:
    """[B, M, V] tempered logits -> [B, M, 1] float32: a token is kept iff its tempered logit is at least this."""
    cut = tempered.new_full((*tempered.shape[:-1], 1), _MINUS_INF)
    best = None
    if plan.max_top_k:
        best = tempered.topk(min(plan.max_top_k, tempered.shape[-1]), dim=-1).values
        last = (plan.top_k.clamp(1, best.shape[-1]) - 1).view(-1, 1, 1).expand(-1, tempered.shape[1], 1)
        cut = torch.where((plan.top_k > 0).view(-1, 1, 1), best.gather(-1, last), cut)
    if plan.nucleus:
        nucleus = _nucleus_cutoff(tempered, cut, best if plan.all_top_k else None, plan)
        cut = torch.where((plan.top_p < 1).view(-1, 1, 1), torch.maximum(cut, nucleus), cut)
    if plan.floors:
        floor = tempered.amax(-1, keepdim=True) + plan.min_p.log().float().view(-1, 1, 1)
        cut = torch.maximum(cut, floor)
    return cut


def _nucleus_cutoff(tempered: Tensor, cut: Tensor, ranked: Tensor | None, plan: SamplingPlan) -> Tensor:
    """[B, M, 1]: lowest logit of the smallest set of best tokens above `cut` whose mass reaches top_p.

    ranked: the best tokens in descending order if they hold all that `cut` keeps; None sorts them out.
    """
    kept = tempered.masked_fill(tempered < cut, _MINUS_INF) if plan.max_top_k else tempered
    normaliser = kept.logsumexp(-1, keepdim=True).double()
    top_p = plan.top_p.view(-1, 1, 1)
    if ranked is None and tempered.device.type == "cpu":
        # Sorting a vocabulary costs a CPU more than the rest of a cycle, and most nuclei are small. Only here, where it
        # costs nothing, does the host look at the result.
        head = tempered.topk(min(_HEAD, tempered.shape[-1]), dim=-1).values
        covered = (head.double() - normaliser).exp().sum(-1, keepdim=True) >= top_p
        ranked = head if bool((covered | (top_p >= 1)).all()) else None
    if ranked is None:
        ranked = tempered.sort(dim=-1, descending=True).values
    ranked = ranked.masked_fill(ranked < cut, _MINUS_INF)
    share = (ranked.double() - normaliser).exp()
    before = share.cumsum(-1) - share  # the mass of all better tokens; the best one is kept whatever top_p is
    outside = (before >= top_p) | (ranked == _MINUS_INF)
    outside[..., 0] = False
    return ranked.masked_fill(outside, float("inf")).amin(-1, keepdim=True)


def warp(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """[B, M, V] raw (or penalised) logits -> float32 tempered logits, -inf where top-k, top-p or min-p removes a token.

    Greedy rows are neither tempered nor truncated into something that changes their argmax.
    """
    tempered = temper(logits, plan)
    if not plan.truncates:
        return tempered
    return tempered.masked_fill(tempered < cutoff(tempered, plan), _MINUS_INF)


def draw(logits: Tensor, plan: SamplingPlan, coin: Tensor | None, history: History | None = None) -> Tensor:
    """One token per row: [B, V] logits and [B] coins in [0, 1) -> [B] int64.

    Greedy rows take the argmax, the lowest id on ties, and ignore their coin; it may be None when all rows are greedy.
    """
    z = penalise(logits.unsqueeze(1), plan, history)
    top = z.squeeze(1).argmax(-1)
    if not plan.draws:
        return top
    if coin is None:
        raise ConfigError("temperature > 0 draws tokens, so it needs coins; pass CoinStream(seeds).single().")
    return torch.where(plan.greedy, top, inverse_cdf(warp(z, plan).squeeze(1), coin))


def inverse_cdf(warped: Tensor, coin: Tensor, removed: Tensor | None = None) -> Tensor:
    """The token at which the cumulative mass first exceeds `coin`: [B, V] warped logits, [B] coins -> [B] int64.

    removed: [B, V] bool or None, tokens without mass (the residual of a rejection). Where it removes all the mass,
    which only rounding can bring about, it is ignored, so that the draw stays inside the target's support.
    Sums run in float64: a float32 sum over 150 k tokens would misplace coins by more than a rare token's mass.
    """
    mass = (warped - warped.amax(-1, keepdim=True)).double().exp()
    if removed is not None:
        rest = mass.masked_fill(removed, 0.0)
        mass = torch.where(rest.sum(-1, keepdim=True) > 0, rest, mass)
    cumulative = mass.cumsum(-1)
    wanted = coin.double().unsqueeze(-1) * cumulative[..., -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(-1)
    return found.clamp(max=warped.shape[-1] - 1)  # only NaN logits get here without a token; the caller refuses them


@dataclass(frozen=True)
class Coins:
    """All randomness of one cycle. accept: [B, M] float32 in [0, 1), one per node; draw: [B] float64 in [0, 1)."""

    accept: Tensor
    draw: Tensor


class CoinStream:
    """Coins from one CPU generator per row, so that a request's coins depend on neither the device nor its batch.

    seeds: one per row; None draws a fresh one, readable afterwards in `seeds`.
    """

    def __init__(self, seeds: Sequence[int | None], device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._generators = [torch.Generator() for _ in seeds]
        self.seeds = [
            generator.seed() if seed is None else generator.manual_seed(seed).initial_seed()
            for generator, seed in zip(self._generators, seeds, strict=True)
        ]

    def next(self, nodes: int) -> Coins:
        """The coins of one cycle over a tree of `nodes` nodes."""
        draw = self.single()
        accept = torch.stack([torch.rand(nodes, generator=g, dtype=torch.float32) for g in self._generators])
        return Coins(accept.to(self._device, non_blocking=True), draw)

    def single(self) -> Tensor:
        """[B] float64: the coin of one draw, for a token that no draft precedes."""
        coins = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in self._generators])
        return coins.to(self._device, non_blocking=True)
