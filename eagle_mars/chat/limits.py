"""What a server lets its clients ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eagle_mars.config import DraftConfig, Rule, VerifyConfig
from eagle_mars.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """A ceiling on relaxation and on the size of draft trees.

    rules: that requests may name. max_theta_relaxation: 1 - theta at most, so .1 allows theta >= .9. max_gap: nats.
    None is no ceiling; with a ceiling on one margin only, the other margin is refused.
    max_nodes, max_depth, max_top_k: of a draft tree; they bound the time of one cycle and its memory.
    """

    rules: tuple[Rule, ...] = ("exact", "mars")
    max_theta_relaxation: float | None = None
    max_gap: float | None = None
    max_nodes: int = 256
    max_depth: int = 32
    max_top_k: int = 64

    def within(self, draft_vocabulary: int) -> Limits:
        """The same, with max_top_k no more than what the draft head can rank."""
        return replace(self, max_top_k=min(self.max_top_k, draft_vocabulary))

    def check(self, verify: VerifyConfig, draft: DraftConfig) -> None:
        """Raise ConfigError, naming the ceiling, if the options go beyond it."""
        if verify.rule not in self.rules:
            raise ConfigError(f"rule={verify.rule!r} isn't allowed here; use one of: {', '.join(self.rules)}.")
        for name, value, most in (
            ("total_token", draft.total_token, self.max_nodes),
            ("depth", draft.depth, self.max_depth),
            ("top_k", draft.top_k, self.max_top_k),
        ):
            if value > most:
                raise ConfigError(f"draft.{name}={value} is more than the {most} allowed here; lower it.")
        if verify.relaxes and verify.rule in ("mars", "mars-paper", "mars-released"):
            self._check_margin(verify)

    def _check_margin(self, verify: VerifyConfig) -> None:
        if self.max_theta_relaxation is None and self.max_gap is None:
            return
        if verify.margin == "logit-ratio":
            if self.max_theta_relaxation is None:
                raise ConfigError("relaxation is limited in nats here; use margin='logit-gap' with a gap.")
            least = 1 - self.max_theta_relaxation
            if verify.theta is not None and verify.theta < least - 1e-9:  # 1 - .1 isn't exactly .9
                raise ConfigError(
                    f"theta={verify.theta:g} relaxes more than this server allows; use {least:g} or more."
                )
        else:
            if self.max_gap is None:
                raise ConfigError("relaxation is limited by theta here; use margin='logit-ratio' with a theta.")
            if verify.gap is not None and verify.gap > self.max_gap:
                raise ConfigError(
                    f"gap={verify.gap:g} relaxes more than this server allows; use {self.max_gap:g} or less."
                )
