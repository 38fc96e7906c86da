"""Per-request options: frozen, checked when built, unknown keys are errors (`ConfigError`)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from eagle_mars.errors import ConfigError

Rule = Literal["exact", "mars", "mars-paper", "mars-released", "typical", "topk-delta", "prob-ratio"]
Margin = Literal["logit-ratio", "logit-gap"]
Branch = Literal["exact-first", "longest"]


class _Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_sentence(type(self).__name__, error)) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, checked like a new one (pydantic's `model_copy` would not check)."""
        return type(self)(**{**self.model_dump(exclude_unset=True), **changes})


def _sentence(owner: str, error: ValidationError) -> str:
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{owner} has no option {name!r}; remove it or correct its name."
    reason = first["msg"].removeprefix("Value error, ")
    return reason if not name else f"{owner}.{name}={first['input']!r} is not usable: {reason}."


class DraftConfig(_Options):
    """Shape of the draft tree, under EAGLE's names (EAGLE_SPEC section 0, "argument naming trap").

    total_token: nodes of the tree *including* the root, so `total_token - 1` tokens are drafted per cycle.
    depth: expansions after the first level; a path holds at most `depth + 1` drafts.
    top_k: beam width and fan-out; 1 gives a chain.
    entropy_stop: a level is not expanded where the draft is undecided: where the square root of the mean entropy, in
        nats, of the distributions that its children were taken from is above this (SVIP, arXiv 2411.18462; EAGLE_SPEC
        6). Trees are then smaller than `total_token` now and then, and on a GPU each level costs a read of the host.
    """

    total_token: int = Field(60, ge=2)
    depth: int = Field(7, ge=0)
    top_k: int = Field(10, ge=1)
    entropy_stop: float | None = Field(None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.total_token - 1 > self.pool_size:
            raise ValueError(
                f"total_token={self.total_token} is impossible with depth={self.depth} and top_k={self.top_k}: "
                f"only {self.pool_size + 1} nodes are reachable; lower total_token or raise depth or top_k."
            )
        return self

    @property
    def levels(self) -> int:
        """Levels below the root: the most drafts that one cycle can accept."""
        return self.depth + 1

    @property
    def pool_size(self) -> int:
        """Candidates that growth scores before it keeps the `total_token - 1` best."""
        return self.top_k + self.depth * self.top_k**2

    @classmethod
    def chain(cls, length: int) -> DraftConfig:
        """A chain of `length` drafted tokens."""
        return cls(total_token=length + 1, depth=length - 1, top_k=1)


class VerifyConfig(_Options):
    """How drafts are accepted (`eagle_mars.verify.rules` lists the rules and their guarantees).

    theta: low margin is z2 > theta * z1 on raw logits (`margin="logit-ratio"`); None or 1.0 switches relaxation off.
    gap: low margin is z1 - z2 < gap, in nats at T = 1 (`margin="logit-gap"` only); 0 switches relaxation off.
    branch: which acceptable path is followed when a node has several acceptable children.
    protected_ids: tokens that relaxation neither accepts nor overrides; None protects every special token.
    max_relaxed_per_cycle: relaxed tokens per draft tree at most; None is no limit.
    max_regret: nats per response (log p(top-1) - log p(accepted), summed); a relaxation that would exceed what is left
        is refused, and once it is spent the rule is `exact` for good.
    released_ratio, released_q: the two effects of `mars-released`, apart: follow the ratio test or never; divide by the
        draft's probability, as the released code does, or by one.
    epsilon, alpha: `typical` accepts p(x) > min(epsilon, alpha * exp(-entropy)).
    rank: `topk-delta` and `prob-ratio` accept only among the `rank` best tokens; None is 10 and 3, as in their sources.
    delta: `topk-delta` accepts p(x) >= p(top-1) - delta.
    rho: `prob-ratio` accepts p(x) >= rho * p(top-1).
    """

    rule: Rule = "mars"
    theta: float | None = Field(default=0.9, gt=0, le=1)
    margin: Margin = "logit-ratio"
    gap: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    branch: Branch = "exact-first"
    protected_ids: tuple[NonNegativeInt, ...] | None = None
    max_relaxed_per_cycle: int | None = Field(default=None, ge=0)
    max_regret: float | None = Field(default=None, ge=0)
    released_ratio: bool = True
    released_q: Literal["draft", "one"] = "draft"
    epsilon: float = Field(default=0.09, gt=0, le=1)
    alpha: float = Field(default=0.3, gt=0, le=1)
    rank: int | None = Field(default=None, ge=1)
    delta: float = Field(default=0.6, ge=0, le=1)
    rho: float = Field(default=0.5, gt=0, le=1)

    @model_validator(mode="after")
    def _margin_has_its_number(self) -> Self:
        if self.margin == "logit-gap" and self.gap is None:
            raise ValueError("margin='logit-gap' needs gap in nats, e.g. gap=1.0; gap=0 switches relaxation off")
        if self.margin == "logit-ratio" and self.gap is not None:
            raise ValueError("gap is read with margin='logit-gap' only; set that margin or leave gap out")
        return self

    @model_validator(mode="after")
    def _released_as_released(self) -> Self:
        if self.rule != "mars-released":
            return self
        if self.branch == "longest" or self.margin == "logit-gap":
            raise ValueError(
                "rule='mars-released' repeats the released code, which knows neither branch='longest' nor "
                "margin='logit-gap'; leave both out or use rule='mars'"
            )
        if self.protected_ids or self.max_relaxed_per_cycle is not None or self.max_regret is not None:
            raise ValueError(
                "rule='mars-released' repeats the released code, which has no guards; "
                "leave protected_ids, max_relaxed_per_cycle and max_regret out or use rule='mars'"
            )
        if self.released_ratio and (self.theta is None or self.theta == 1):
            raise ValueError(
                "rule='mars-released' without relaxation is still biased by its p/q test, so theta=None can't mean "
                "exact here; say released_ratio=False, or use rule='exact'"
            )
        return self

    @property
    def relaxes(self) -> bool:
        """False when the options make this rule identical to `exact`, bit for bit."""
        if self.rule == "mars-released":
            return self.released_ratio or self.released_q == "draft"
        if self.rule == "exact" or self.max_relaxed_per_cycle == 0 or self.max_regret == 0:
            return False
        if self.rule in ("typical", "topk-delta", "prob-ratio"):
            return True
        if self.margin == "logit-gap":
            return bool(self.gap)
        return self.theta is not None and self.theta < 1


class SamplingConfig(_Options):
    """How the target's distribution is warped (transformers' meaning and order) and the seed of all coins.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1.0 is off. min_p: 0 is off. seed: None draws a fresh one.
    repetition_penalty: transformers' (1.0 is off); counts the prompt and the response.
    presence_penalty, frequency_penalty: OpenAI's (0 is off), in logits per token present and per occurrence; count the
        response only.
    """

    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 1e-5  # EAGLE's threshold, so that its scripts take the same branch

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
