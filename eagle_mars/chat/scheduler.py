"""The queue in front of the engine: one thread decodes, a few responses take turns cycle by cycle, the rest wait."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread

from eagle_mars.chat.response import Response
from eagle_mars.errors import EagleMarsError

logger = logging.getLogger(__name__)


class QueueFullError(EagleMarsError):
    """Every place in the queue is taken: try again later."""


class ClosedError(EagleMarsError):
    """The service is shutting down."""


class DecodingError(EagleMarsError):
    """Decoding failed for a reason that isn't the client's; the log has it."""


class Scheduler:
    """Runs responses first come, first served; those that run share the engine in turns of one cycle.

    max_active: responses that take turns, each with its own key/value cache. max_waiting: places in the queue behind
    them. on_end: told of every response that has ended, from any thread; must be quick.
    """

    def __init__(
        self, max_active: int = 4, max_waiting: int = 32, on_end: Callable[[Response], None] | None = None
    ) -> None:
        self.max_active, self.max_waiting = max_active, max_waiting
        self._on_end = on_end
        self._active: deque[Response] = deque()
        self._waiting: deque[Response] = deque()
        self._running: Response | None = None
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="eagle-mars-decode", daemon=True)
        self._thread.start()

    def submit(self, response: Response) -> None:
        """Append to the queue. Raises QueueFullError, ClosedError."""
        with self._changed:
            self._drop_cancelled()
            if self._closed:
                raise ClosedError("the server is shutting down; try again later.")
            if self.active + self.waiting >= self.max_active + self.max_waiting:
                raise QueueFullError(f"{self.active + self.waiting} requests are queued already; try again later.")
            self._waiting.append(response)
            self._changed.notify()

    @property
    def active(self) -> int:
        """Responses that hold engine state."""
        return len(self._active) + (self._running is not None)

    @property
    def waiting(self) -> int:
        """Responses that wait for their first cycle, those whose client has left not counted."""
        return sum(not response.cancelled for response in tuple(self._waiting))

    @property
    def alive(self) -> bool:
        """Whether the decoding thread still runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Cancel everything, end the thread and wait for it. Later submissions are refused."""
        with self._changed:
            self._closed = True
            for response in (*self._active, *self._waiting, *([self._running] if self._running else [])):
                response.cancel()
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._active or self._closed)
                while self._waiting and len(self._active) < self.max_active:
                    self._active.append(self._waiting.popleft())
                if not self._active:
                    return
                self._running = self._active.popleft()
            again = self._turn(self._running)
            with self._changed:
                if again:
                    self._active.append(self._running)
                self._running = None

    def _turn(self, response: Response) -> bool:
        """One cycle; whatever goes wrong in it ends this response only."""
        try:
            if response.advance():
                return True
        except EagleMarsError as error:
            response.end("failed", error)
        except Exception as error:
            logger.exception("a request failed while decoding")
            failure = DecodingError(f"decoding failed with {type(error).__name__}; the server's log says why.")
            response.end("failed", failure)
        self._ended(response)
        return False

    def _ended(self, response: Response) -> None:
        if self._on_end is None:
            return
        try:
            self._on_end(response)
        except Exception:
            logger.exception("the observer of ended responses failed")

    def _drop_cancelled(self) -> None:
        """Those that left while waiting make room at once; the thread ends the ones that ran."""
        for response in [waiting for waiting in self._waiting if waiting.cancelled]:
            self._waiting.remove(response)
            response.end("cancelled")
            self._ended(response)
