"""Tokens → text, incrementally: text never shrinks, partial characters and partial stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Decodes a growing sequence of ids; `push` returns the text that has become certain.

    tokenizer: a Hugging Face tokenizer. Special tokens are skipped.
    A window of a few ids is decoded per token, so the cost doesn't grow with the response.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # first id of the window that gives the newest ids their context (leading spaces)
        self._read = 0  # ids whose text has been returned

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still partial."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """What is still held back at the end of the response."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        known = self._decode(self._window, self._read)
        text = self._decode(self._window, len(self._ids))
        if text.endswith("\ufffd") and not final:  # the bytes of a character may still be incomplete
            return ""
        if len(text) > len(known):  # special tokens have no text: the window keeps its context until some text comes
            self._window = self._read
        self._read = len(self._ids)
        return text[len(known) :]

    def _decode(self, start: int, end: int) -> str:
        ids = self._ids[start:end]
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if ids else ""


class StopStrings:
    """Watches text for stop strings, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """The part of the text so far that no stop string can claim any more; sets `hit` when one is complete."""
        if not self._stops:
            return text
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.hit = True
            safe, self._held = self._held[: min(found)], ""
            return safe
        keep = max(
            (n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])),
            default=0,
        )
        cut = len(self._held) - keep
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held
