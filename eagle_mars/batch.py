"""Several responses decoded together: one target forward a cycle for all of them.

Each response keeps what it has when decoded alone: its options, coins, stop rules and counters. So its text doesn't
depend on who shares its cycles, as far as floating point allows (T = 0 in fp32: the same tokens, exact ties apart).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from eagle_mars.engine import Autoregression, Drawn, Engine, Request, Speculation
from eagle_mars.errors import ConfigError, LogitsError
from eagle_mars.result import Step
from eagle_mars.sampling import History
from eagle_mars.tree import DraftTree
from eagle_mars.verify import RowPlan, plan

R = TypeVar("R", Autoregression, Speculation)
Outcome = Step | LogitsError


class Batch(ABC, Generic[R]):
    """Responses that share cycles; they join at any time and leave when they end or are told to.

    places: responses at most. rows: of the cache, that a cycle may need behind a response's tokens.
    Prompts are prefilled alone, so no prompt is padded; accepted paths differ in length, so what one cycle appends to a
    response's cache is its own, and the forward masks what lies behind the shorter ones.
    """

    def __init__(self, engine: Engine, places: int, rows: int) -> None:
        self.engine = engine
        self.places = places
        self.responses: list[R] = []
        self._cache = engine.target.new_cache(places, engine.target.max_context + rows)
        self._cache.reset(0)
        self._ready: dict[R, deque[Outcome]] = {}  # what cycles that others ran gave
        self._plan: RowPlan | None = None  # of the responses as they are; None after one has come or gone

    @property
    def free(self) -> int:
        """Places that `join` may take."""
        return self.places - len(self.responses)

    @torch.inference_mode()
    def join(self, ids: Tensor, request: Request) -> tuple[R, Step]:
        """Prefill ids [1, L]; the response, to be recognised in `cycle`, and its first token.

        A response that ends with its first token never takes a place.
        Raises ConfigError if the request wants another tree or protects other special tokens than the batch's.
        """
        if not self.free:
            raise RuntimeError(f"all {self.places} places are taken; wait until a response ends")
        if self.responses and set(request.special_ids) != set(self.responses[0].request.special_ids):
            raise ConfigError("responses of a batch share the tokenizer's special ids; decode this one alone.")
        response = self._response(ids, request)
        step = response.prefill()
        if step.finish_reason is None:
            self._take(response)
            response.release()
            self.responses.append(response)
            self._plan = None
        return response, step

    @torch.inference_mode()
    def leave(self, response: R) -> None:
        """Give a response up and free its place; the last one moves there."""
        row = self.responses.index(response)
        self._drop(row)
        self.responses[row] = self.responses[-1]
        self.responses.pop()
        self._plan = None

    @torch.inference_mode()
    def cycle(self) -> list[tuple[R, Outcome]]:
        """One cycle of every response; those that it ends have left when it returns. Empty without responses.

        A response whose logits are unusable ends with a LogitsError in the place of its step; the others go on.
        """
        if not self.responses:
            return []
        outcomes = list(zip(self.responses, self._advance(), strict=True))
        for response, outcome in outcomes:
            if isinstance(outcome, LogitsError) or outcome.finish_reason is not None:
                self.leave(response)
        return outcomes

    def decode(self, ids: Tensor, request: Request) -> Iterator[Step]:
        """A response, step by step, sharing cycles: whoever asks for a step that isn't there yet runs one for all.

        Closing the iterator frees the place. Raises what `join` raises, and LogitsError.
        """
        response, step = self.join(ids, request)
        ready = self._ready[response] = deque[Outcome]()
        try:
            yield step
            while step.finish_reason is None:
                while not ready:
                    for other, outcome in self.cycle():
                        if other in self._ready:  # else somebody drives it by `cycle`
                            self._ready[other].append(outcome)
                found = ready.popleft()
                if isinstance(found, LogitsError):
                    raise found
                step = found
                yield step
        finally:
            del self._ready[response]
            if response in self.responses:
                self.leave(response)

    @abstractmethod
    def _response(self, ids: Tensor, request: Request) -> R:
        """A response that hasn't begun. Raises ConfigError if it can't share the others' cycles."""

    @abstractmethod
    def _advance(self) -> list[Outcome]:
        """Forward all responses once; what that gave each of them."""

    def _take(self, response: R) -> None:
        """Move the caches of a prefilled response in; all of them, or none if that raises."""
        self._cache.join(response.cache)

    def _drop(self, row: int) -> None:
        self._cache.drop(row)

    def _roots(self) -> Tensor:
        """[B] int64: the newest token of each response."""
        return torch.cat([response.root for response in self.responses])

    def _row_plan(self) -> RowPlan:
        if self._plan is None:
            requests = [response.request for response in self.responses]
            self._plan = plan(
                [request.verify for request in requests],
                [request.sampling for request in requests],
                vocab_size=self.engine.target.config.vocab_size,
                special_ids=requests[0].special_ids,
                device=self.engine.target.device,
            )
        return self._plan

    def _padded_history(self, histories: list[History | None]) -> History | None:
        """What penalties count, padded with -1; of a response without penalties nothing."""
        if not self._row_plan().sampling.penalises:
            return None
        nothing = torch.full((1, 0), -1, device=self.engine.target.device)
        parts = [history or History(nothing, nothing) for history in histories]
        return History(_padded([part.prompt for part in parts]), _padded([part.generated for part in parts]))


class TargetBatch(Batch[Autoregression]):
    """Responses of the target alone: a token per response and cycle. The baseline of a `SpeculativeBatch`."""

    def __init__(self, engine: Engine, places: int) -> None:
        super().__init__(engine, places, rows=1)

    def _response(self, ids: Tensor, request: Request) -> Autoregression:
        return Autoregression(self.engine, ids, request)

    def _advance(self) -> list[Outcome]:
        tree = DraftTree.bare(self._roots())
        out = self.engine.target.forward_tree(tree, self._cache, features=False)
        logits = out.logits[:, 0].to(self.engine.target.device)
        self._cache.commit([[0]] * len(self.responses))
        sampling = self._row_plan().sampling
        coins = torch.cat([response.coins.single() for response in self.responses]) if sampling.draws else None
        drawn = Drawn.of(
            logits, sampling, coins, self._padded_history([response.history for response in self.responses])
        )
        outcomes: list[Outcome] = []
        for row, (response, read) in enumerate(zip(self.responses, drawn.read(), strict=True)):
            try:
                outcomes.append(response.take(drawn, read, logits, row))
            except LogitsError as error:
                outcomes.append(error)
        return outcomes


def _padded(rows: list[Tensor]) -> Tensor:
    """Rows [1, n_b] int64 → [B, max n_b], padded with -1."""
    return torch.nn.utils.rnn.pad_sequence([row[0] for row in rows], batch_first=True, padding_value=-1)
