"""From a request's `SamplingParams` to the numbers of its rows, and from rows and numbers to rewritten logits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from eagle_mars.engines.request import PREFIX, MarsRequest
from eagle_mars.engines.rewrite import force, limit, relaxable, runner_up_masked
from eagle_mars.errors import ConfigError

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_CONSTRAINTS = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget")
_GREEDY_BELOW = 1e-5  # vLLM's own threshold
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class RowRule:
    """One request's numbers, as every row of it reads them: thresholds as `MarsRequest`, sampling as vLLM's.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.
    """

    ratio: float
    gap: float
    max_relaxed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def warped(self) -> bool:
        """Whether sampling may leave the runner-up without probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def numbers(self) -> tuple[float, ...]:
        return astuple(self)


STRICT = RowRule(float("inf"), 0.0, 0, 0.0, 0, 1.0, 0.0)


def constraint(params: SamplingParams) -> str | None:
    """The option that masks or forces tokens, by its name: such a request is verified strictly."""
    return next((name for name in _CONSTRAINTS if getattr(params, name) not in (None, [], {})), None)


def check(params: SamplingParams, default: MarsRequest | None) -> None:
    """Raise `ConfigError` for a request that can't have what it asks of MARS; default None is a server without it."""
    asked = [name for name in params.extra_args or {} if name.startswith(PREFIX)]
    if asked and default is None:
        raise ConfigError(
            f"{asked[0]} is not usable: MARS is off on this server; start it with --speculative-config and "
            """--additional-config '{"eagle_mars": {}}'."""
        )
    if asked and default is not None and not MarsRequest.parse(params.extra_args, default).strict:
        name = constraint(params)
        if name is not None:
            raise ConfigError(f"{asked[0]} relaxes, which {name} rules out: leave one of the two out.")


def row_rule(params: SamplingParams, default: MarsRequest) -> RowRule:
    """The numbers of a request that `check` has let in. Raises `ConfigError` for one that it hasn't."""
    request = MarsRequest.parse(params.extra_args, default)
    if request.strict or constraint(params) is not None:
        return STRICT
    ratio, gap = request.thresholds
    most = _NO_LIMIT if request.max_relaxed is None else min(request.max_relaxed, _NO_LIMIT)
    if params.temperature < _GREEDY_BELOW:
        return RowRule(ratio, gap, most, 0.0, 0, 1.0, 0.0)
    return RowRule(ratio, gap, most, params.temperature, max(params.top_k, 0), params.top_p, params.min_p)


def rewrite(
    logits: Tensor, drafts: Tensor, position: Tensor, numbers: Tensor, rules: Collection[RowRule], protected: Tensor
) -> Tensor:
    """Rewrite logits [R, V] in place; returns the rewritten rows, [R] bool. No host read.

    drafts: [R] int64, -1 where a row has none. position: [R] int64, a row's place among its request's, from 0.
    numbers: [R, 7] float64, `RowRule.numbers` of each row's request. rules: those of the batch, which the host knows.
    protected: [V] bool.
    """
    ratio, gap, most, temperature, top_k, top_p, min_p = numbers.unbind(1)
    greedy = masked = None
    if not all(rule.greedy for rule in rules):
        greedy = temperature == 0
    if any(rule.warped for rule in rules):
        widest = max(rule.top_k for rule in rules)
        masked = runner_up_masked(logits, temperature.float(), top_k.long(), top_p.float(), min_p.float(), widest)
    rows = relaxable(logits, drafts, ratio, gap, protected, greedy, masked)
    rows = limit(rows, position, most.long())
    force(logits, rows, drafts, greedy)
    return rows
