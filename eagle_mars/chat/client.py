"""A client of our own server: the growing answer to a conversation, with the record of every token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from eagle_mars.errors import EagleMarsError
from eagle_mars.result import Provenance


class ServerError(EagleMarsError):
    """The server can't be reached, or refused the request; the message is its own."""


@dataclass(frozen=True)
class Choice:
    """One of the target's two best tokens. logit: raw. logprob: of the raw logits."""

    token: str
    logit: float
    logprob: float


@dataclass(frozen=True)
class ShownToken:
    """Some text of the answer. best: the target's two best tokens where it was chosen."""

    text: str
    provenance: Provenance
    best: tuple[Choice, ...]


@dataclass
class Answer:
    """An answer as far as it has come. speculation: what the server says about all of it, at its end."""

    tokens: list[ShownToken] = field(default_factory=list)
    seconds: float = 0.0
    completion_tokens: int | None = None
    speculation: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def relaxed(self) -> int:
        return sum(token.provenance == "relaxed" for token in self.tokens)

    @property
    def tau(self) -> float:
        """Tokens per cycle: the server's at the end, before that a count of what has come."""
        if self.speculation is not None:
            return self.speculation["tau"]
        # Every cycle ends with a token by the target; the first of those comes from prefill, which is no cycle.
        cycles = sum(token.provenance == "target" for token in self.tokens) - 1
        return (len(self.tokens) - 1) / cycles if cycles > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        count = len(self.tokens) if self.completion_tokens is None else self.completion_tokens
        return count / self.seconds if self.seconds else 0.0


class ServerClient:
    """url: the server's, without /v1. Raises ServerError from every method."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A long prompt may take minutes on a CPU before the first byte comes.
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(600, connect=5))

    def model(self) -> str:
        """The name of the server's model."""
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.is_error:
            raise ServerError(_message(response))
        return response.json()["data"][0]["id"]

    def chat(self, messages: Sequence[dict[str, str]], **options: Any) -> Iterator[Answer]:
        """Yield the one growing answer after every chunk; closing the iterator cancels it on the server."""
        body = {"messages": messages, "stream": True, "details": True, "stream_options": {"include_usage": True}}
        answer, started = Answer(), time.monotonic()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json={**body, **options}) as response:
                if response.is_error:
                    response.read()
                    raise ServerError(_message(response))
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    _add(answer, json.loads(line.removeprefix("data: ")))
                    if answer.speculation is None:
                        answer.seconds = time.monotonic() - started
                    yield answer
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ServerError:
        return ServerError(f"no server answers at {self.url} ({error}); start one with: eagle-mars serve")


def _add(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        raise ServerError(chunk["error"]["message"])
    for choice in chunk["choices"]:
        for detail in choice.get("details", ()):
            best = tuple(Choice(**candidate) for candidate in detail["best"])
            answer.tokens.append(ShownToken(detail["text"], detail["provenance"], best))
    if chunk.get("usage"):
        answer.completion_tokens = chunk["usage"]["completion_tokens"]
        answer.speculation = chunk["speculation"]
        answer.seconds = answer.speculation["seconds"]


def _message(response: httpx.Response) -> str:
    try:
        return response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {response.status_code}."
