"""What a request to a serving engine may say about MARS, and the server's default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import inf
from textwrap import shorten
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, field_validator, model_validator

from eagle_mars.config import Margin, VerifyConfig
from eagle_mars.errors import ConfigError

PREFIX = "mars_"
ENVIRONMENT = "EAGLE_MARS"
_EXAMPLE = '{"theta": 0.9}'


class MarsRequest(BaseModel):
    """Relaxation of one request; what is left out comes from the server's default.

    theta: low margin is z2 > theta * z1 (`margin="logit-ratio"`); None or 1.0 is strict.
    gap: low margin is z1 - z2 < gap nats (`margin="logit-gap"`); 0 is strict.
    max_relaxed: relaxed tokens per verification step at most; None is no limit, 0 is strict.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    theta: float | None = Field(default=None, gt=0, le=1)
    margin: Margin = "logit-ratio"
    gap: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_relaxed: NonNegativeInt | None = None

    @field_validator("theta", "gap", "max_relaxed", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object) -> object:
        if isinstance(value, bool):  # pydantic reads true as 1.0, which would be strict
            raise ValueError("a number is needed, not true or false")
        return value

    @model_validator(mode="after")
    def _margin_has_its_number(self) -> Self:
        if self.margin == "logit-gap" and self.gap is None:
            raise ValueError("margin 'logit-gap' needs a gap in nats, e.g. gap 1.0; gap 0 is strict")
        if self.margin == "logit-gap" and self.theta is not None:
            raise ValueError("theta is read with margin 'logit-ratio' only; set that margin or leave theta out")
        if self.margin == "logit-ratio" and self.gap is not None:
            raise ValueError("gap is read with margin 'logit-gap' only; set that margin or leave gap out")
        return self

    @property
    def strict(self) -> bool:
        """Nothing can be relaxed: the request gets the engine's own verification."""
        return self.max_relaxed == 0 or self.thresholds == (inf, 0.0)

    @property
    def thresholds(self) -> tuple[float, float]:
        """(ratio, gap) for `eagle_mars.engines.rewrite`: inf and 0 where a margin is off."""
        if self.margin == "logit-gap":
            return inf, self.gap or 0.0
        return (inf if self.theta is None or self.theta == 1 else self.theta), 0.0

    def verify_config(self, protected_ids: tuple[int, ...] | None = None) -> VerifyConfig:
        """The core's options that mean the same."""
        return VerifyConfig(
            theta=self.theta,
            margin=self.margin,
            gap=self.gap,
            protected_ids=protected_ids,
            max_relaxed_per_cycle=self.max_relaxed,
        )

    @classmethod
    def parse(cls, args: Mapping[str, Any] | None, default: MarsRequest) -> MarsRequest:
        """The request's `mars_*` entries laid over the server's default; other names are other people's.

        `mars_theta` or `mars_gap` alone chooses its margin, so `mars_theta=1.0` is strict whatever the default.
        Raises `ConfigError` for an unknown `mars_*` name or a value that isn't usable.
        """
        given = {name.removeprefix(PREFIX): value for name, value in (args or {}).items() if name.startswith(PREFIX)}
        if not given:
            return default
        return cls._checked({**default._kept_beside(given), **given}, PREFIX)

    @classmethod
    def default_from(cls, options: Mapping[str, Any]) -> MarsRequest:
        """The server's default from a mapping with the fields' names; empty is strict.

        Raises `ConfigError` for an unknown name or a value that isn't usable.
        """
        margin = {"margin": "logit-gap"} if "gap" in options else {}
        return cls._checked({**margin, **options}, "")

    @classmethod
    def default_from_environment(cls, environment: Mapping[str, str]) -> MarsRequest | None:
        """The server's default from the JSON object in `EAGLE_MARS`; None where it isn't set: the plugin stays off.

        Raises `ConfigError` where it is no JSON object, and as `default_from` does.
        """
        text = environment.get(ENVIRONMENT, "").strip()
        if not text:
            return None
        try:
            options = json.loads(text)
        except json.JSONDecodeError:
            options = None
        if not isinstance(options, dict):
            raise ConfigError(f"{ENVIRONMENT}={text!r} is not a JSON object; write e.g. {ENVIRONMENT}='{_EXAMPLE}'.")
        return cls.default_from(options)

    def _kept_beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the default still says once the request has spoken: its number belongs to its margin alone."""
        margin = given.get("margin") or ("logit-gap" if "gap" in given and "theta" not in given else "logit-ratio")
        kept: dict[str, Any] = {"max_relaxed": self.max_relaxed}
        if not given.keys() & {"margin", "theta", "gap"} or margin == self.margin:
            kept |= self.model_dump(include={"margin", "gap" if self.margin == "logit-gap" else "theta"})
        return {"margin": margin, **kept}

    @classmethod
    def _checked(cls, values: Mapping[str, Any], prefix: str) -> MarsRequest:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigError(f"The MARS options contradict each other: {reason}.")
        name = f"{prefix}{first['loc'][0]}"
        if first["type"] == "extra_forbidden":
            known = ", ".join(f"{prefix}{field}" for field in cls.model_fields)
            raise ConfigError(f"{name!r} is no MARS option; correct its name to one of {known}.")
        raise ConfigError(f"{name}={shorten(repr(first['input']), 80)} is not usable: {reason}.")
