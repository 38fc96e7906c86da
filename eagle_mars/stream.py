"""Steps → text pieces, and the result once the response has ended."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from eagle_mars.result import GenerationResult, Provenance, Step, TokenScores
from eagle_mars.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Piece:
    """Some text, and how the token that completed it was accepted.

    tokens: ids since the piece before; most often one, none where only the end shows that held back text is no stop
    string. scores: one for each of them, when the request asked for them.
    """

    text: str
    provenance: Provenance
    tokens: tuple[int, ...]
    scores: tuple[TokenScores, ...] = ()


class ResponseStream:
    """Iterate over the pieces of one response; afterwards `result` holds the whole of it.

    steps: what an `Engine` yields. stops: strings that end the response; neither they nor anything after them is text.
    Closing the stream early abandons the response after the running cycle.
    """

    def __init__(
        self, steps: Iterator[Step], tokenizer: Any, prompt_tokens: int, stops: Sequence[str], rule: str, guarantee: str
    ) -> None:
        self._steps = steps
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)
        self._prompt_tokens, self._rule, self._guarantee = prompt_tokens, rule, guarantee
        self._result: GenerationResult | None = None
        self._cycles = self._run()
        self._pieces = chain.from_iterable(self._cycles)

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def cycles(self) -> Iterator[tuple[Piece, ...]]:
        """The pieces of each cycle together; empty where a cycle's text is still held back."""
        return self._cycles

    def close(self) -> None:
        """Abandon the response: the engine's state of it is freed."""
        self._cycles.close()
        self._free_engine()

    def _free_engine(self) -> None:
        """Its caches, and its place in a batch, without waiting for the garbage collector."""
        if isinstance(self._steps, Generator):
            self._steps.close()

    @property
    def result(self) -> GenerationResult:
        """The finished response; drains what has not been iterated yet."""
        for _ in self._cycles:
            pass
        if self._result is None:
            raise RuntimeError("the stream was closed before the response ended, so there is no result")
        return self._result

    def _run(self) -> Generator[tuple[Piece, ...]]:
        steps: list[Step] = []
        tokens: list[int] = []
        provenance: list[Provenance] = []
        scores: list[TokenScores] = []
        pieces: list[tuple[str, Provenance]] = []
        told = 0  # tokens that earlier pieces carry

        def piece(text: str) -> Iterator[Piece]:
            nonlocal told
            if text:
                pieces.append((text, provenance[-1]))
                yield Piece(text, provenance[-1], tuple(tokens[told:]), tuple(scores[told:]))
                told = len(tokens)

        for step in self._steps:
            steps.append(step)
            cycle: list[Piece] = []
            for index, (token, kind) in enumerate(zip(step.tokens, step.provenance, strict=True)):
                tokens.append(token)
                provenance.append(kind)
                scores += step.scores[index : index + 1]
                cycle += piece(self._stops.push(self._detokenizer.push(token)))
                if self._stops.hit:
                    break
            if step.finish_reason is not None and not self._stops.hit:
                tail = self._stops.push(self._detokenizer.flush())
                cycle += piece(tail if self._stops.hit else tail + self._stops.flush())
            if self._stops.hit:
                self._free_engine()  # before the text is handed over: who has it may never ask again
            yield tuple(cycle)
            if self._stops.hit:
                break
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
