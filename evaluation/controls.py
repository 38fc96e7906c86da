"""Controls: the target alone, disturbed as often as a rule relaxes. What a rule does to a score beyond them is its own.

Both walk as plain autoregression does, same coins, and disturb some of the positions where the two best logits have low
margin under the rule's own definition (protected tokens apart, as in the rule):

- `random-swap` emits the runner-up there, however likely it is;
- `matched` draws there between the two best tokens, each with its share of their probability at T = 1.

`rate` is the chance that a low-margin position is disturbed. `Control.like` takes it from answers of the rule: relaxed
tokens per low-margin position, which makes swaps per token as frequent as the rule's relaxed tokens, as far as the
control's own text meets low margins as often. The text drifts, so the rate that was reached belongs in the report: a
swapped token, and a matched draw that gave the runner-up, is marked `relaxed` in the provenance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eagle_mars import EaModel, GenerationResult, SamplingConfig, VerifyConfig
from eagle_mars.engine import Request
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.result import Step
from eagle_mars.sampling import CoinStream, SamplingPlan, draw
from eagle_mars.stream import ResponseStream
from eagle_mars.target import TargetModel, check_context
from eagle_mars.verify.margins import fires
from evaluation.answers import Answer
from evaluation.metrics import turns

ControlKind = Literal["random-swap", "matched"]
_SWAP_STREAM = 1 << 62  # the disturbance has its own coins, so that rate 0 leaves the answer as it is
GUARANTEE = "A control: the target's own text, disturbed on purpose."


class Control(BaseModel):
    """kind: which control. verify: the rule whose margin and protected ids it shares. rate: chance, 0..1, that a
    low-margin position is disturbed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ControlKind
    verify: VerifyConfig
    rate: float = Field(ge=0, le=1)

    @classmethod
    def like(cls, kind: ControlKind, verify: VerifyConfig, answers: Sequence[Answer]) -> Self:
        """A control that disturbs as often as the rule did in `answers`.

        Raises ConfigError if the rule has no margin, or the answers met no low margin.
        """
        if verify.rule not in ("mars", "mars-paper"):
            raise ConfigError(f"{verify.rule!r} has no low-margin positions to match; a control needs mars.")
        stats = [turn for answer in answers for turn in turns(answer)]
        low = sum(turn.low_margin for turn in stats)
        if not low:
            raise ConfigError("these answers met no low margin, so there is nothing to match; give the rule's answers.")
        return cls(kind=kind, verify=verify, rate=min(1.0, sum(turn.relaxed for turn in stats) / low))


def generate(
    ea: EaModel,
    ids: Tensor,
    control: Control,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig,
    stop: Sequence[str] = (),
) -> GenerationResult:
    """The control's response to prompt ids [1, L]: `EaModel.generate`'s result, without cycles.

    Raises ConfigError, ContextLengthError, LogitsError.
    """
    check_context(ea.target, ids.shape[1], max_new_tokens)
    request = Request(
        max_new_tokens=max_new_tokens,
        verify=control.verify,
        sampling=sampling,
        stop_ids=ea.stop_ids,
        special_ids=ea.special_ids,
    )
    steps = control_steps(ea.target, ids, request, control)
    return ResponseStream(steps, ea.tokenizer, ids.shape[1], stop, control.kind, GUARANTEE).result


def control_steps(target: TargetModel, ids: Tensor, request: Request, control: Control) -> Iterator[Step]:
    """Yield the response to ids [1, L] token by token."""
    if request.sampling.penalises:
        raise ConfigError("controls take no penalties; leave repetition, presence and frequency penalties out.")
    if request.sampling.seed is None:
        raise ConfigError("a control is compared with other runs, so it needs a seed; set SamplingConfig(seed=...).")
    ids = ids.to(target.device)
    cache = target.new_cache(batch=1, max_length=ids.shape[1] + request.max_new_tokens)
    chooser = _Chooser(request, control, target.device)
    clock = perf_counter()
    logits = target.prefill(ids, cache, features=False).logits
    for left in range(request.max_new_tokens, 0, -1):
        choice = chooser.choose(logits[:, -1])
        stopped = choice.token in request.stop_ids
        now = perf_counter()
        seconds, clock = now - clock, now
        yield Step(
            tokens=(choice.token,),
            provenance=("relaxed" if choice.swapped else "target",),
            accepted=None,
            seconds=seconds,
            finish_reason="stop" if stopped else "length" if left == 1 else None,
            regret=choice.regret,
            low_margin=int(choice.low),
        )
        if stopped:
            return
        if left > 1:
            logits = target.step(torch.tensor([[choice.token]], device=target.device), cache)


@dataclass(frozen=True)
class _Choice:
    """token: what is emitted. low: the position had a low margin. swapped: only the disturbance made it the runner-up.
    regret: nats between the two, 0 where nothing was swapped."""

    token: int
    low: bool
    swapped: bool
    regret: float


class _Chooser:
    """The choice of one token from its logits, and all coins of a response."""

    def __init__(self, request: Request, control: Control, device: torch.device) -> None:
        seed = request.sampling.seed
        assert seed is not None  # checked by control_steps
        self._plan = SamplingPlan.compile([request.sampling], device)
        self._greedy = request.sampling.greedy
        self._coins = CoinStream([seed], device)
        self._swaps = CoinStream([seed ^ _SWAP_STREAM])
        self._control = control
        self._protected = frozenset(
            request.special_ids if control.verify.protected_ids is None else control.verify.protected_ids
        )

    def choose(self, logits: Tensor) -> _Choice:
        """One token from logits [1, V]; raises LogitsError where the best logit isn't finite."""
        best = logits.float().topk(2, dim=-1)
        own = int(draw(logits, self._plan, None if self._greedy else self._coins.single()))
        (z1, z2), (t1, t2) = best.values[0].tolist(), best.indices[0].tolist()
        if not abs(z1) < float("inf"):
            raise LogitsError(f"the target's best logit is {z1}, so no token can be chosen; check the checkpoint.")
        low = self._low(best.values[0])
        may_swap = low and not self._protected & {t1, t2}  # the rule, too, counts a protected position as low margin
        if not may_swap or float(self._swaps.single()) >= self._control.rate:
            return _Choice(own, low, False, 0.0)
        runner_up = True
        if self._control.kind == "matched":
            runner_up = float(self._swaps.single()) < float(torch.sigmoid(torch.tensor(z2 - z1, dtype=torch.float64)))
        token = t2 if runner_up else t1
        swapped = runner_up and token != own
        return _Choice(token, low, swapped, z1 - z2 if swapped else 0.0)

    def _low(self, top: Tensor) -> bool:
        verify = self._control.verify
        if verify.margin == "logit-gap":
            return bool(fires(top[0], top[1], gap=verify.gap))
        return bool(fires(top[0], top[1], theta=verify.theta if verify.theta is not None else 1.0))
