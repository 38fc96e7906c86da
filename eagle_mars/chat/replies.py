"""Responses in OpenAI's shapes, with `speculation` beside `usage`."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from eagle_mars.result import Candidate, GenerationResult
from eagle_mars.stream import Piece

Json = dict[str, Any]
TokenText = Callable[[int], str]
_LOWEST = -9999.0  # OpenAI's stand-in for a logarithm of zero, which JSON can't hold


class Reply(ABC):
    """Builds the bodies of one request: the whole one, or its chunks.

    token_text: text of one id. choices: per prompt. logprobs: how many best tokens to show beside each token; None
    shows no logprobs. details: show how every piece was accepted.
    """

    prefix: str
    whole: str
    chunk: str

    def __init__(self, model: str, token_text: TokenText, choices: int, logprobs: int | None, details: bool) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._token_text, self._choices, self._logprobs, self._details = token_text, choices, logprobs, details

    def body(self, results: Sequence[GenerationResult], pieces: Sequence[Sequence[Piece]]) -> Json:
        """The whole response; results and pieces of choice 0, 1, ..."""
        choices = [
            {
                "index": index,
                **self._content(result.text),
                **self._extras(index, part),
                "finish_reason": result.finish_reason,
                "speculation": speculation([result]),
            }
            for index, (result, part) in enumerate(zip(results, pieces, strict=True))
        ]
        return {
            **self._head,
            "object": self.whole,
            "choices": choices,
            "usage": self._usage(results),
            "speculation": speculation(results),
        }

    def delta(self, index: int, pieces: Sequence[Piece]) -> Json:
        """The chunk that brings new text."""
        text = "".join(piece.text for piece in pieces)
        extras = self._extras(index, pieces)
        return self._chunk([{"index": index, **self._delta(text), **extras, "finish_reason": None}])

    def last(self, index: int, result: GenerationResult) -> Json:
        """The chunk that ends a choice."""
        choice = {"index": index, **self._delta(""), "logprobs": None, "finish_reason": result.finish_reason}
        told = speculation([result])
        return {**self._chunk([{**choice, "speculation": told}]), "speculation": told}

    def opening(self, index: int) -> Json | None:
        """The chunk before the first text, where the shape has one."""
        return None

    def usage(self, results: Sequence[GenerationResult]) -> Json:
        """The chunk that `stream_options.include_usage` asks for."""
        return {**self._chunk([]), "usage": self._usage(results), "speculation": speculation(results)}

    def _usage(self, results: Sequence[GenerationResult]) -> Json:
        prompt = sum(result.prompt_tokens for result in results[:: self._choices])  # choices share their prompt
        completion = sum(result.new_tokens for result in results)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk, "choices": choices}

    def _extras(self, index: int, pieces: Sequence[Piece]) -> Json:
        extras: Json = {"logprobs": None}
        if self._logprobs is not None:
            extras["logprobs"] = self._logprobs_of(index, pieces, self._logprobs)
        if self._details:
            extras["details"] = [self._detail(piece) for piece in pieces]
        return extras

    def _detail(self, piece: Piece) -> Json:
        best = piece.scores[-1].best[:2] if piece.scores else ()
        shown = [
            {"token": self._token_text(c.token_id), "logit": _finite(c.logit), "logprob": _finite(c.logprob)}
            for c in best
        ]
        return {"text": piece.text, "provenance": piece.provenance, "best": shown}

    @abstractmethod
    def _content(self, text: str) -> Json: ...

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def _logprobs_of(self, index: int, pieces: Sequence[Piece], best: int) -> Json: ...


class ChatReply(Reply):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _content(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_of(self, index: int, pieces: Sequence[Piece], best: int) -> Json:
        scores = [score for piece in pieces for score in piece.scores]
        content = [
            {**self._token(score.chosen), "top_logprobs": [self._token(c) for c in score.best[:best]]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _token(self, candidate: Candidate) -> Json:
        text = self._token_text(candidate.token_id)
        # Part of a character has no text of its own, and a decoded replacement character would be the wrong bytes.
        encoded = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _finite(candidate.logprob), "bytes": encoded}


class CompletionReply(Reply):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._shown: defaultdict[int, int] = defaultdict(int)  # characters of each choice that earlier chunks brought

    def _content(self, text: str) -> Json:
        return {"text": text}

    _delta = _content

    def _logprobs_of(self, index: int, pieces: Sequence[Piece], best: int) -> Json:
        told = completion_logprobs(pieces, best, self._token_text, self._shown[index])
        self._shown[index] += sum(map(len, told["tokens"]))
        return told


def completion_logprobs(pieces: Sequence[Piece], best: int, token_text: TokenText, offset: int = 0) -> Json:
    """Scores of the pieces' tokens in the columns of OpenAI's completions. offset: characters before the first."""
    told: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if best else None, "text_offset": []}
    for score in (score for piece in pieces for score in piece.scores):
        text = token_text(score.chosen.token_id)
        told["tokens"].append(text)
        told["token_logprobs"].append(_finite(score.chosen.logprob))
        told["text_offset"].append(offset)
        if best:
            told["top_logprobs"].append({token_text(c.token_id): _finite(c.logprob) for c in score.best[:best]})
        offset += len(text)
    return told


def speculation(results: Sequence[GenerationResult]) -> Json:
    """What decoding did, summed over choices; see `GenerationResult`."""
    cycles = sum(result.cycles for result in results)
    return {
        "rule": results[0].rule,
        "guarantee": results[0].guarantee,
        "cycles": cycles,
        "tau": sum(result.tau * result.cycles for result in results) / cycles if cycles else 0.0,
        "relaxed": sum(result.relaxed for result in results),
        "exact_prefix_tokens": sum(result.exact_prefix_tokens for result in results),
        "regret": sum(result.regret for result in results),
        "seconds": sum(result.seconds for result in results),
    }


def _finite(value: float) -> float:
    return max(value, _LOWEST)
