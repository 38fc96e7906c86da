"""Steps → text pieces, and the result once the response has ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_mars.result import GenerationResult, Provenance, Step
from eagle_mars.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """Some text, and how the token that completed it was accepted."""

    text: str
    provenance: Provenance


class ResponseStream:
    """Iterate over the pieces of one response; afterwards `result` holds the whole of it.

    steps: what an `Engine` yields. stops: strings that end the response; neither they nor anything after them is text.
    Closing the iterator early abandons the response after the running cycle.
    """

    def __init__(
        self, steps: Iterator[Step], tokenizer: Any, prompt_tokens: int, stops: Sequence[str], rule: str, guarantee: str
    ) -> None:
        self._steps = steps
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._prompt_tokens, self._rule, self._guarantee = prompt_tokens, rule, guarantee
        self._result: GenerationResult | None = None
        self._pieces = self._run()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    @property
    def result(self) -> GenerationResult:
        """The finished response; drains what has not been iterated yet."""
        for _ in self._pieces:
            pass
        if self._result is None:
            raise RuntimeError("the stream was closed before the response ended, so there is no result")
        return self._result

    def _run(self) -> Iterator[Piece]:
        steps: list[Step] = []
        tokens: list[int] = []
        provenance: list[Provenance] = []
        pieces: list[tuple[str, Provenance]] = []

        def piece(text: str) -> Iterator[Piece]:
            if text:
                pieces.append((text, provenance[-1]))
                yield Piece(text, provenance[-1])

        for step in self._steps:
            steps.append(step)
            for token, kind in zip(step.tokens, step.provenance, strict=True):
                tokens.append(token)
                provenance.append(kind)
                yield from piece(self._stops.push(self._detokenizer.push(token)))
                if self._stops.hit:
                    break
            if self._stops.hit:
                break
        if not self._stops.hit:
            tail = self._stops.push(self._detokenizer.flush())
            yield from piece(tail if self._stops.hit else tail + self._stops.flush())
        last = steps[-1].finish_reason
        self._result = GenerationResult(
            prompt_tokens=self._prompt_tokens,
            token_ids=tuple(tokens),
            provenance=tuple(provenance),
            text="".join(text for text, _ in pieces),
            pieces=tuple(pieces),
            finish_reason="stop" if self._stops.hit or last is None else last,
            accepted_lengths=tuple(step.accepted for step in steps if step.accepted is not None),
            regret=sum(step.regret for step in steps),
            low_margin=sum(step.low_margin for step in steps),
            rescued=sum(step.rescued for step in steps),
            nonpositive_top=sum(step.nonpositive_top for step in steps),
            prefill_seconds=steps[0].seconds,
            decode_seconds=sum(step.seconds for step in steps[1:]),
            rule=self._rule,
            guarantee=self._guarantee,
        )
