"""Prometheus metrics of one service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from eagle_mars.chat.response import Response
from eagle_mars.chat.scheduler import Scheduler

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_TAU = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)


class Metrics:
    """Counts responses as they end (`observe` is a service's `on_end`), and shows the queue of `watch`ed schedulers."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter("eagle_mars_requests", "Responses that ended.", ["outcome"], registry=registry)
        self._prompt = Counter("eagle_mars_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._tokens = Counter(
            "eagle_mars_completion_tokens", "Tokens of responses, by acceptance.", ["provenance"], registry=registry
        )
        self._cycles = Counter("eagle_mars_cycles", "Target forwards over a draft tree.", registry=registry)
        self._accepted = Counter("eagle_mars_accepted_drafts", "Drafts accepted in all cycles.", registry=registry)
        self._regret = Counter("eagle_mars_regret_nats", "Regret of relaxed tokens.", registry=registry)
        self._tau = Histogram("eagle_mars_tau", "Tokens per cycle of a response.", buckets=_TAU, registry=registry)
        self._first = Histogram(
            "eagle_mars_time_to_first_token_seconds", "From submission.", buckets=_SECONDS, registry=registry
        )
        self._active = Gauge("eagle_mars_active_requests", "Responses that take turns.", registry=registry)
        self._waiting = Gauge("eagle_mars_queue_length", "Responses that wait for their turn.", registry=registry)

    def watch(self, scheduler: Scheduler) -> None:
        """Show the lengths of this queue."""
        self._active.set_function(lambda: scheduler.active)
        self._waiting.set_function(lambda: scheduler.waiting)

    def observe(self, response: Response) -> None:
        """Count a response that has ended."""
        self._requests.labels(response.outcome).inc()
        if response.first_token_at is not None:
            self._first.observe(response.first_token_at - response.submitted_at)
        if response.outcome != "finished":
            return
        result = response.result
        self._prompt.inc(result.prompt_tokens)
        for provenance in ("exact", "relaxed", "target"):
            self._tokens.labels(provenance).inc(result.provenance.count(provenance))
        self._cycles.inc(result.cycles)
        self._accepted.inc(sum(result.accepted_lengths))
        self._regret.inc(result.regret)
        if result.cycles:
            self._tau.observe(result.tau)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)
