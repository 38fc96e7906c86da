"""How much of a response's time is spent inside forward passes, so that the rest is the engine's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import nn

from eagle_mars import EaModel


class ForwardClock:
    """Adds up the seconds of the forwards that it watches; a forward inside a forward counts once.

    seconds: in all of them, `elapsed` all that passed since `reset`. target_calls: forwards of the target.
    clock: `time.thread_time` counts the CPU seconds of a single thread's work on a busy machine.
    On a GPU every reading waits for the device, which a real cycle doesn't do: there it tells device time, and the
    engine's share is an upper bound.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._inside = False
        self.reset()

    def reset(self) -> None:
        """Start again from nothing."""
        self.seconds, self.target_calls = 0.0, 0
        self._started = self._now()

    @property
    def elapsed(self) -> float:
        """Seconds since `reset`."""
        return self._now() - self._started

    @contextmanager
    def watching(self, ea: EaModel) -> Iterator[None]:
        """Time the target, and the head's passes and projections."""
        with ExitStack() as stack:
            stack.enter_context(self._timed(ea.base_model, "forward", counts=True))
            for name in ("forward", "fuse", "logits"):
                stack.enter_context(self._timed(ea.ea_layer, name))
            yield

    @contextmanager
    def _timed(self, module: nn.Module, name: str, counts: bool = False) -> Iterator[None]:
        own = vars(module).get(name)  # accelerate puts a forward on the instance; the class's comes to light by itself
        setattr(module, name, self._wrap(getattr(module, name), counts))
        try:
            yield
        finally:
            delattr(module, name)
            if own is not None:
                setattr(module, name, own)

    def _wrap(self, function: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return function(*arguments, **keywords)
            self._inside = True
            self.target_calls += counts
            started = self._now()
            try:
                return function(*arguments, **keywords)
            finally:
                self.seconds += self._now() - started
                self._inside = False

        return timed

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._clock()
