"""FastChat's worker parameters as options of the session layer, and its prompts as messages again.

A FastChat client builds the prompt itself, from a template that the worker sends it. Ours sends one whose roles are
markers, so that the worker gets the messages back and applies the tokenizer's own chat template. The markers are
constants: the API server keeps a worker's template for ever, across restarts of the worker.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from pydantic import Field, ValidationError

from eagle_mars.chat.protocol import GenerationBody, Positive
from eagle_mars.chat.session import ChatOptions, ChatService
from eagle_mars.chat.templates import Message
from eagle_mars.config import SamplingConfig
from eagle_mars.errors import ConfigError

_MARKER = "\x02eagle_mars:{}\x03"
SYSTEM, USER, ASSISTANT = (_MARKER.format(role) for role in ("system", "user", "assistant"))
_MARKERS = re.compile(_MARKER.format("(system|user|assistant)"))

_GREEDY_TOP_P = 1e-8  # FastChat's own threshold, below which it takes the best token


def split_prompt(prompt: str) -> list[Message] | None:
    """The messages of a prompt built from the template; None for raw text. The open assistant turn is no message."""
    before, *parts = _MARKERS.split(prompt)
    if before or not parts:
        return None
    messages = [{"role": role, "content": text} for role, text in zip(parts[::2], parts[1::2], strict=True)]
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return [message for message in messages if message != {"role": "system", "content": ""}]


class WorkerParams(GenerationBody):
    """The body of /worker_generate(_stream): FastChat's names; null is the default, unknown keys are ignored.

    The fields of `GenerationBody` that FastChat doesn't know are passed on by `eagle-mars fastchat api`.
    """

    prompt: str
    top_p: float | None = Field(None, ge=0, le=1)
    max_new_tokens: Positive | None = None
    stop_token_ids: list[int] | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    images: list[Any] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None

    @classmethod
    def parse(cls, body: Any) -> WorkerParams:
        """Raises ConfigError with one sentence about the first mistake."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "the request"
            raise ConfigError(f"{name} is not usable: {first['msg']}.") from None

    def ids(self, service: ChatService) -> list[int]:
        """The prompt's ids. Raises ConfigError for what the chat template refuses."""
        messages = split_prompt(self.prompt)
        return service.text_ids(self.prompt) if messages is None else service.chat_ids(messages)

    def worker_options(self, service: ChatService, prompt_tokens: int) -> ChatOptions:
        """Raises ConfigError for unusable values and for what this worker can't do."""
        if self.images:
            raise ConfigError("this model reads text only; send no images.")
        if (self.best_of or 1) > 1 or self.use_beam_search:
            raise ConfigError("best_of and use_beam_search aren't available; leave them out.")
        options = self.options(service, temperature=1.0)[0]
        room = service.max_context - prompt_tokens
        asked = self.max_new_tokens or service.default_max_new_tokens
        return replace(
            options,
            # As FastChat's worker: an answer is as long as the context allows. Without room the service says so.
            max_new_tokens=min(asked, room) if room > 0 else asked,
            stop=tuple(stop for stop in options.stop if stop),
            stop_ids=tuple(self.stop_token_ids or ()),
        )

    def _sampling(self, temperature: float) -> SamplingConfig:
        if self.top_p is not None and self.top_p < _GREEDY_TOP_P:
            return self.model_copy(update={"temperature": 0.0, "top_p": None})._sampling(temperature)
        return super()._sampling(temperature)

    def _scores(self) -> int | None:
        return self.logprobs
