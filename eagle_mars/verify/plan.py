"""Per-request options, compiled once per request into per-row tensors, so that no cycle touches Python options."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_mars.config import Rule, SamplingConfig, VerifyConfig
from eagle_mars.errors import ConfigError
from eagle_mars.sampling import SamplingPlan

RULES: tuple[Rule, ...] = ("exact", "mars", "mars-paper", "mars-released", "typical", "topk-delta", "prob-ratio")
MARGIN_RULES = frozenset({"mars", "mars-paper", "mars-released"})
COMPARATORS = frozenset({"typical", "topk-delta", "prob-ratio"})
_DEFAULT_RANK = {"topk-delta": 10, "prob-ratio": 3}
_CODES: dict[str, int] = {name: code for code, name in enumerate(RULES)}
_NO_LIMIT = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class RowPlan:
    """Options of a batch: [B] tensors on the device, and what the host may branch on without reading them.

    rule: index into `RULES`; a row whose options can't relax is `exact` here. theta: inf when the ratio is off.
    gap: 0 when the gap is off. protected: [B, V] bool. max_relaxed, max_regret: very large when unlimited.
    by_gap, longest, released_ratio, draft_q: the choices of `VerifyConfig` as bool.
    rules: the rules that occur in this batch. max_rank: the largest `rank` of a comparator, 0 without one.
    """

    rule: Tensor
    theta: Tensor
    gap: Tensor
    by_gap: Tensor
    longest: Tensor
    protected: Tensor
    max_relaxed: Tensor
    max_regret: Tensor
    released_ratio: Tensor
    draft_q: Tensor
    epsilon: Tensor
    alpha: Tensor
    rank: Tensor
    delta: Tensor
    rho: Tensor
    sampling: SamplingPlan
    rules: frozenset[str]
    max_rank: int
    vocab_size: int

    @property
    def batch(self) -> int:
        return self.rule.shape[0]

    def rows_with(self, names: frozenset[str]) -> Tensor:
        """[B] bool: rows whose rule is one of `names`."""
        result = torch.zeros_like(self.longest)
        for name in names & self.rules:
            result = result | (self.rule == _CODES[name])
        return result


def plan(
    configs: VerifyConfig | Sequence[VerifyConfig],
    samplings: SamplingConfig | Sequence[SamplingConfig] | None = None,
    *,
    vocab_size: int,
    special_ids: Collection[int] = (),
    batch: int | None = None,
    device: torch.device | str = "cpu",
) -> RowPlan:
    """Compile the options of each row of the batch.

    configs, samplings: one for all rows or one per row; None is greedy. batch: needed only where both are single.
    special_ids: what `protected_ids=None` protects: EOS and every special token of the tokenizer.
    Raises `ConfigError` when the lengths disagree or a protected id is not in the vocabulary.
    """
    rows, warps = _rows(configs, SamplingConfig() if samplings is None else samplings, batch)
    names = [c.rule if c.relaxes else "exact" for c in rows]

    def column(values: Iterable[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    infinity = float("inf")
    ranks = [c.rank or _DEFAULT_RANK.get(c.rule, 1) for c in rows]
    return RowPlan(
        rule=column((_CODES[name] for name in names), torch.int64),
        theta=column((infinity if c.theta is None or c.theta == 1 else c.theta for c in rows), torch.float64),
        gap=column((c.gap or 0.0 for c in rows), torch.float64),
        by_gap=column((c.margin == "logit-gap" for c in rows), torch.bool),
        longest=column((c.branch == "longest" for c in rows), torch.bool),
        protected=_protected(rows, special_ids, vocab_size).to(device),
        max_relaxed=column((_limit(c.max_relaxed_per_cycle) for c in rows), torch.int64),
        max_regret=column((infinity if c.max_regret is None else c.max_regret for c in rows), torch.float64),
        released_ratio=column((c.released_ratio for c in rows), torch.bool),
        draft_q=column((c.released_q == "draft" for c in rows), torch.bool),
        epsilon=column((c.epsilon for c in rows), torch.float64),
        alpha=column((c.alpha for c in rows), torch.float64),
        rank=column(ranks, torch.int64),
        delta=column((c.delta for c in rows), torch.float64),
        rho=column((c.rho for c in rows), torch.float64),
        sampling=SamplingPlan.compile(warps, device),
        rules=frozenset(names),
        max_rank=max((rank for rank, name in zip(ranks, names, strict=True) if name in _DEFAULT_RANK), default=0),
        vocab_size=vocab_size,
    )


def _rows(
    configs: VerifyConfig | Sequence[VerifyConfig],
    samplings: SamplingConfig | Sequence[SamplingConfig],
    batch: int | None,
) -> tuple[list[VerifyConfig], list[SamplingConfig]]:
    lengths = {len(x) for x in (configs, samplings) if isinstance(x, Sequence)}
    lengths |= {batch} if batch is not None else set()
    if len(lengths) > 1 or 0 in lengths:
        raise ConfigError(
            f"One option set per row is needed, but {sorted(lengths)} were given; make the lengths agree."
        )
    count = lengths.pop() if lengths else 1
    rows = list(configs) if isinstance(configs, Sequence) else [configs] * count
    warps = list(samplings) if isinstance(samplings, Sequence) else [samplings] * count
    return rows, warps


def _protected(rows: list[VerifyConfig], special_ids: Collection[int], vocab_size: int) -> Tensor:
    mask = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    # Tokenizers may name special ids beyond the logits' width: no child can be accepted there, so they need no bit.
    special = [token for token in special_ids if token < vocab_size]
    for row, config in enumerate(rows):
        ids = special if config.protected_ids is None else list(config.protected_ids)
        if ids and max(ids) >= vocab_size:
            raise ConfigError(f"protected_ids holds {max(ids)}, but the target's vocabulary has {vocab_size} tokens.")
        mask[row, ids] = True
    return mask


def _limit(value: int | None) -> int:
    return _NO_LIMIT if value is None else min(value, _NO_LIMIT)
