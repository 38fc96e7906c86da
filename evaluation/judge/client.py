"""The judge: chat completions of any OpenAI-compatible endpoint."""

from __future__ import annotations

import openai

from eagle_mars.errors import ConfigError, EagleMarsError


class JudgeError(EagleMarsError):
    """The endpoint gave no judgment, after all retries."""


class Judge:
    """A judge model behind an endpoint.

    base_url: None is OPENAI_BASE_URL or OpenAI's own. The key is OPENAI_API_KEY; an endpoint given by URL may do
    without. Greedy, at most `max_tokens` (FastChat's 2048) per judgment; a model that refuses `temperature` or
    `max_tokens`, as reasoning models do, is asked without the one, or with `max_completion_tokens`.
    Raises ConfigError without a key.
    """

    def __init__(
        self, model: str, base_url: str | None = None, *, max_tokens: int = 2048, retries: int = 5, timeout: float = 120
    ) -> None:
        self.model = model
        self._options: dict[str, object] = {"temperature": 0, "max_tokens": max_tokens}
        try:
            self._client = openai.OpenAI(base_url=base_url, max_retries=retries, timeout=timeout)
        except openai.OpenAIError:
            if base_url is None:
                raise ConfigError("the judge needs a key: set OPENAI_API_KEY, or name a local --base-url.") from None
            self._client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=retries, timeout=timeout)

    def ask(self, system: str, user: str) -> str:
        """The judgment's text. Raises JudgeError."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        while True:
            options = self._options
            try:
                done = self._client.chat.completions.create(  # type: ignore[call-overload]  # options vary by model
                    model=self.model, messages=messages, **options
                )
            except openai.BadRequestError as error:
                if not self._give_way(str(error), options):
                    raise JudgeError(f"the judge refuses the request: {error}") from error
                continue
            except openai.OpenAIError as error:
                raise JudgeError(f"the judge can't be asked: {error}") from error
            text = done.choices[0].message.content if done.choices else None
            if not text:
                raise JudgeError("the judge answered with nothing; raise --max-tokens if it thinks before it answers")
            return str(text)

    def _give_way(self, complaint: str, options: dict[str, object]) -> bool:
        """Do without the option that the complaint names, from now on; False if it names none of `options`."""
        if "max_tokens" in complaint and "max_tokens" in options:
            rest = {name: value for name, value in options.items() if name != "max_tokens"}
            self._options = {**rest, "max_completion_tokens": options["max_tokens"]}
            return True
        if "temperature" in complaint and "temperature" in options:
            self._options = {name: value for name, value in options.items() if name != "temperature"}
            return True
        return False
