"""One submitted request as its client sees it: pieces of text from the decoding thread, the result, and a way out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from threading import Condition
from time import monotonic
from typing import Literal

from eagle_mars.result import GenerationResult
from eagle_mars.stream import Piece, ResponseStream

Outcome = Literal["finished", "cancelled", "failed"]


class Response:
    """Iterate over the pieces of each cycle, `for` in a thread or `async for` in an event loop; then read `result`.

    Iterating raises what decoding raised. After `cancel` it just ends. One consumer per response.
    outcome: None until the response has ended. submitted_at, first_token_at, ended_at: `time.monotonic` seconds.
    """

    def __init__(self, stream: ResponseStream, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.outcome: Outcome | None = None
        self.submitted_at = monotonic()
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self._stream: ResponseStream | None = stream
        self._result: GenerationResult | None = None
        self._error: Exception | None = None
        self._cancelled = False
        self._ready: deque[tuple[Piece, ...]] = deque()
        self._changed = Condition()
        self._wake: Callable[[], object] | None = None  # tells an event loop that something changed

    # --- the client's side ---

    def cancel(self) -> None:
        """Give up: a waiting response leaves the queue, a running one ends after its cycle. Harmless at any time."""
        with self._changed:
            self._cancelled = True
            self._notify()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def result(self) -> GenerationResult:
        """The whole response, once iteration has ended. Raises RuntimeError before that or after `cancel`."""
        if self._result is None:
            raise RuntimeError("the response has no result: it was cancelled, failed, or hasn't ended yet")
        return self._result

    def wait(self) -> GenerationResult:
        """Iterate to the end. Raises what decoding raised, RuntimeError if the response was cancelled."""
        for _ in self:
            pass
        return self.result

    def __iter__(self) -> Iterator[tuple[Piece, ...]]:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                pieces = self._take()
            if pieces is None:
                return
            yield pieces

    async def __aiter__(self) -> AsyncIterator[tuple[Piece, ...]]:
        async for _, pieces in merged([self]):
            if pieces is not None:
                yield pieces

    def poll(self) -> tuple[Piece, ...] | None:
        """What is ready now, maybe nothing; None at the end. Raises what decoding raised."""
        with self._changed:
            return self._take() if self._has_news() else ()

    def on_change(self, wake: Callable[[], object]) -> None:
        """Call `wake`, from any thread, whenever `poll` may have something new."""
        with self._changed:
            self._wake = wake

    def _has_news(self) -> bool:
        return bool(self._ready) or self.outcome is not None or self._cancelled

    def _take(self) -> tuple[Piece, ...] | None:
        if self._ready and not self._cancelled:
            pieces = tuple(piece for cycle in self._ready for piece in cycle)
            self._ready.clear()
            return pieces
        if self._error is not None:
            raise self._error
        return None

    # --- the decoding thread's side ---

    def advance(self) -> bool:
        """Decode one cycle; False once the response has ended. Raises whatever decoding raises."""
        assert self._stream is not None  # advanced only until it ends
        if self._cancelled:
            self.end("cancelled")
            return False
        pieces = next(self._stream.cycles(), None)
        if pieces is None:
            self._result = self._stream.result
            self.end("finished")
            return False
        if self.first_token_at is None:
            self.first_token_at = monotonic()
        if pieces:
            with self._changed:
                self._ready.append(pieces)
                self._notify()
        return True

    def end(self, outcome: Outcome, error: Exception | None = None) -> None:
        """Free the engine's state and tell the client."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        with self._changed:
            self.outcome, self._error, self.ended_at = outcome, error, monotonic()
            self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        if self._wake is not None:
            try:
                self._wake()
            except RuntimeError:  # the client's event loop is closed: nobody will ever read this
                self._cancelled, self._wake = True, None


async def merged(responses: Sequence[Response]) -> AsyncIterator[tuple[int, tuple[Piece, ...] | None]]:
    """(index, pieces) of several responses as they come, and (index, None) when one has ended."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    for response in responses:
        response.on_change(lambda: loop.call_soon_threadsafe(changed.set))
    running = dict(enumerate(responses))
    while running:
        changed.clear()
        news = False
        for index, response in tuple(running.items()):
            pieces = response.poll()
            if pieces is None:
                del running[index]
            if pieces != ():
                news = True
                yield index, pieces
        if not news:  # else there may be more already, of which no call will tell
            await changed.wait()
