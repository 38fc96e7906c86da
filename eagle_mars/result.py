"""What one cycle and one whole response report, and how they are counted (DESIGN section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Provenance = Literal["exact", "relaxed", "target"]


@dataclass(frozen=True)
class Candidate:
    """One token of the target's distribution. logit: raw. logprob: of the raw logits, before penalties and warpers."""

    token_id: int
    logit: float
    logprob: float


@dataclass(frozen=True)
class TokenScores:
    """What the target thought of a token that it emitted, and of its own best ones, the best first."""

    chosen: Candidate
    best: tuple[Candidate, ...]


@dataclass(frozen=True)
class Step:
    """The tokens that one cycle adds to the response.

    tokens, provenance: cut at the first stop token and at max_new_tokens. `exact` and `relaxed` tokens were drafted,
    `target` tokens come from the target itself.
    accepted: drafts accepted in this cycle, before any cut; None where nothing was drafted, which is no cycle: the
        token that prefill yields, and a last token that needs no draft.
    regret and the counts after it: of the whole cycle, before any cut. seconds: wall time since the step before.
    scores: one per token if the request asked for them, else empty.
    finish_reason: set on the last step.
    """

    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    accepted: int | None
    seconds: float
    regret: float = 0.0
    low_margin: int = 0
    rescued: int = 0
    nonpositive_top: int = 0
    scores: tuple[TokenScores, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None


@dataclass(frozen=True)
class GenerationResult:
    """One response.

    token_ids: the new tokens, the stop token included. text: decoded, without special tokens and stop strings.
    pieces: the text in parts, each with the provenance of its token.
    accepted_lengths: accepted drafts of each cycle, uncut.
    regret: nats, Σ log p(top-1) - log p(accepted) over relaxed tokens; uncut, like the counts after it.
    low_margin, rescued, nonpositive_top: nodes on the walked paths with a low margin, rejections that relaxation turned
    into acceptances, and nodes whose best logit was <= 0 (where the ratio never relaxes).
    prefill_seconds: until the first token. decode_seconds: everything after it, the draft head's prompt included.
    """

    prompt_tokens: int
    token_ids: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    text: str
    pieces: tuple[tuple[str, Provenance], ...]
    finish_reason: Literal["stop", "length"]
    accepted_lengths: tuple[int, ...]
    regret: float
    low_margin: int
    rescued: int
    nonpositive_top: int
    prefill_seconds: float
    decode_seconds: float
    rule: str
    guarantee: str = field(repr=False, default="")

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def cycles(self) -> int:
        """Target forwards over a draft tree."""
        return len(self.accepted_lengths)

    @property
    def tau(self) -> float:
        """Tokens per cycle, the target's own included, uncut; 0 when prefill alone gave the answer."""
        return sum(n + 1 for n in self.accepted_lengths) / self.cycles if self.cycles else 0.0

    @property
    def relaxed(self) -> int:
        """Tokens of the response that only relaxation accepted."""
        return self.provenance.count("relaxed")

    @property
    def exact_prefix_tokens(self) -> int:
        """Tokens before the first relaxed one: up to there the response is the strict one."""
        return self.provenance.index("relaxed") if self.relaxed else self.new_tokens

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the whole wall time, prefill included."""
        return self.new_tokens / self.seconds
