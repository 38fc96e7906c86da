"""OpenAI's request bodies, with this server's extras. Strict types; unknown fields are kept aside to be logged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from eagle_mars.chat.session import ChatOptions, ChatService
from eagle_mars.config import Branch, DraftConfig, Margin, Rule, SamplingConfig, VerifyConfig
from eagle_mars.errors import ConfigError

MAX_CHOICES = 16
_SEED_LIMIT = 2**63 - MAX_CHOICES  # choice i runs with seed + i
_MARGIN_RULES = ("mars", "mars-paper", "mars-released")


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which no UTF-8 text can") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1, le=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class DraftOptions(BaseModel):
    """Changes to the server's draft tree; see `DraftConfig`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    total_token: int | None = Field(None, ge=2)
    depth: int | None = Field(None, ge=0)
    top_k: int | None = Field(None, ge=1)


class ContentPart(_Body):
    type: str
    text: Text | None = None


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[ContentPart] | None = None


class GenerationBody(_Body):
    """What both endpoints take. An explicit null means the default, except `theta: null`, which is no relaxation.

    rule, theta, margin, gap, branch, max_regret: see `VerifyConfig`. draft: see `DraftConfig`.
    details: the answer comes with its pieces, how each was accepted, and the target's two best candidates there.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: int | None = Field(None, ge=0, lt=_SEED_LIMIT)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="-1 and 0 are off")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    rule: Rule | None = None
    theta: float | None = Field(None, gt=0, le=1)
    margin: Margin | None = None
    gap: float | None = Field(None, ge=0)
    branch: Branch | None = None
    max_regret: float | None = Field(None, ge=0)
    draft: DraftOptions | None = None
    details: bool | None = None

    def unknown_fields(self) -> list[str]:
        return sorted(self.model_extra or ())

    def options(self, service: ChatService, temperature: float) -> list[ChatOptions]:
        """Options of each choice. temperature: for requests that name none. Raises ConfigError."""
        sampling = self._sampling(temperature)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return [
            ChatOptions(
                max_new_tokens=self._max_new_tokens(),
                sampling=sampling if self.seed is None else sampling.replace(seed=self.seed + choice),
                verify=self.verify_config(service.verify),
                draft=self._draft(service.model.draft),
                stop=stop,
                top_logprobs=self._scores(),
            )
            for choice in range(self.n or 1)
        ]

    def verify_config(self, default: VerifyConfig) -> VerifyConfig:
        """`default` with what the request names; naming theta or gap chooses the margin that reads it."""
        names = ("rule", "margin", "gap", "branch", "max_regret")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "theta" in self.model_fields_set:
            given["theta"] = self.theta
        if self.theta is not None and self.gap is not None:
            raise ConfigError("theta and gap are two measures of one margin; give one of them.")
        if "gap" in given:
            given.setdefault("margin", "logit-gap")
        elif "theta" in given:
            given.setdefault("margin", "logit-ratio")
        if given.get("margin") == "logit-ratio":
            given.setdefault("gap", None)
        if ("theta" in given or "gap" in given) and default.rule not in _MARGIN_RULES:
            given.setdefault("rule", "mars")
        return default.replace(**given)

    def _max_new_tokens(self) -> int | None:
        return self.max_tokens

    def _scores(self) -> int | None:
        """How many of the target's best tokens pieces must tell; None is none."""
        return 2 if self.details else None

    def _sampling(self, temperature: float) -> SamplingConfig:
        given = {
            "temperature": temperature if self.temperature is None else self.temperature,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            **{name: getattr(self, name) for name in ("top_p", "min_p", "repetition_penalty")},
            **{name: getattr(self, name) for name in ("presence_penalty", "frequency_penalty")},
        }
        return SamplingConfig(**{name: value for name, value in given.items() if value is not None})

    def _draft(self, default: DraftConfig) -> DraftConfig:
        return default.replace(**self.draft.model_dump(exclude_none=True)) if self.draft else default


class ChatBody(GenerationBody):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def _max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def _scores(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ConfigError("top_logprobs needs logprobs=true; add it or leave top_logprobs out.")
        asked = (self.top_logprobs or 0) if self.logprobs else None
        return max(asked or 0, 2) if self.details else asked


class CompletionBody(GenerationBody):
    prompt: Text | list[Text] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt of the request: texts, or rows of ids. Raises ConfigError if there is none."""
        prompts: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if prompts and isinstance(prompts[0], int):
            prompts = [prompts]
        if not 1 <= len(prompts) * (self.n or 1) <= MAX_CHOICES:
            raise ConfigError(f"prompts times n must be 1 to {MAX_CHOICES}; send several requests.")
        return prompts

    def _scores(self) -> int | None:
        return max(self.logprobs or 0, 2) if self.details else self.logprobs
