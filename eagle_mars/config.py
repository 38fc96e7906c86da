"""Per-request options: frozen, checked when built, unknown keys are errors (`ConfigError`)."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

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
    """

    total_token: int = Field(60, ge=2)
    depth: int = Field(7, ge=0)
    top_k: int = Field(10, ge=1)

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
    gap: low margin is z1 - z2 < gap, in nats at T = 1 (`margin="logit-gap"`); None or 0 switches relaxation off.
    branch: which acceptable path is followed when a node has several acceptable children.
    protected_ids: tokens that relaxation neither accepts nor overrides; None protects every special token.
    max_relaxed_per_cycle: relaxed tokens per draft tree at most; None is no limit.
    max_regret: nats per response (log p(top-1) - log p(accepted), summed), after which the rule is `exact` for good.
    """

    rule: Rule = "mars"
    theta: float | None = Field(0.9, gt=0, le=1)
    margin: Margin = "logit-ratio"
    gap: float | None = Field(None, ge=0, allow_inf_nan=False)
    branch: Branch = "exact-first"
    protected_ids: tuple[int, ...] | None = None
    max_relaxed_per_cycle: int | None = Field(None, ge=0)
    max_regret: float | None = Field(None, ge=0)

    @property
    def relaxes(self) -> bool:
        """False when the options make this rule identical to `exact`, bit for bit."""
        if self.rule == "exact" or self.max_relaxed_per_cycle == 0 or self.max_regret == 0:
            return False
        if self.margin == "logit-gap":
            return bool(self.gap)
        return self.theta is not None and self.theta < 1


class SamplingConfig(_Options):
    """How the target's distribution is warped (transformers' meaning and order) and the seed of all coins.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1.0 is off. seed: None draws a fresh one.
    """

    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0)

    @property
    def greedy(self) -> bool:
        return self.temperature <= 1e-5  # EAGLE's threshold, so that its scripts take the same branch
