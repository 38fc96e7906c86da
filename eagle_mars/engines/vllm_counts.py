"""Relaxed tokens per request and in all, counted where the verifier ran, without making it wait.

The numbers of a step are copied from the device in the background and read in a later one, so the last step of a
request is seen with the next step of the engine. A token beyond a stop string or `max_tokens` counts: the scheduler
cuts it later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle_mars.engines.vllm_common import logger

if TYPE_CHECKING:
    from prometheus_client import Counter


class RelaxedCounts:
    """Sums of one worker. is_live: whether the worker holds a request of that name; its line is logged when it doesn't.

    A request leaves when it ends; model runner V2 also lets a preempted one go and gets it back as a new one.
    """

    def __init__(self, model_name: str, is_live: Callable[[str], bool]) -> None:
        self._metric = _metric().labels(model_name=model_name)
        self._is_live = is_live
        self._pending: deque[tuple[Sequence[str], Tensor, torch.Event | None]] = deque()
        self._relaxed: dict[str, int] = {}

    def begin(self, name: str) -> None:
        """A request appears, relaxing or not."""
        self._relaxed.setdefault(name, 0)

    def add(self, names: Sequence[str], counts: Tensor) -> None:
        """Relaxed tokens of one step: counts is [len(names)] on the device."""
        copied = None
        on_host = counts.to("cpu", non_blocking=True)
        if counts.device.type != "cpu":
            copied = torch.Event(counts.device.type)
            copied.record()
        self._pending.append((names, on_host, copied))

    def collect(self) -> None:
        """Take in what has arrived from the device, and report the requests that have left."""
        while self._pending and (self._pending[0][2] is None or self._pending[0][2].query()):
            names, counts, _ = self._pending.popleft()
            for name, count in zip(names, counts.tolist(), strict=True):
                if count:
                    self._relaxed[name] = self._relaxed.get(name, 0) + count
                    self._metric.inc(count)
        waiting = {name for names, _, _ in self._pending for name in names}
        for name in [name for name in self._relaxed if name not in waiting and not self._is_live(name)]:
            logger.info("Request %s left: %d relaxed tokens.", name, self._relaxed.pop(name))


@cache
def _metric() -> Counter:
    """One per process, in the registry that vLLM shows: across processes, where PROMETHEUS_MULTIPROC_DIR is set."""
    from prometheus_client import Counter

    return Counter("eagle_mars_relaxed_tokens", "Tokens that MARS had the verifier accept.", ["model_name"])
