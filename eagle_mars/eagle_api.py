"""EAGLE's functions, ids in and ids out, over the engine: a script written for EAGLE runs with its import changed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle_mars.config import DraftConfig, SamplingConfig, VerifyConfig
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ContextLengthError
from eagle_mars.result import Step
from eagle_mars.target import TargetModel


@dataclass(frozen=True)
class _Options:
    """The parameters that EAGLE's four functions share, in its spelling."""

    temperature: float
    top_p: float
    top_k: float
    max_new_tokens: int
    max_length: int
    is_llama3: bool
    seed: int | None

    @property
    def sampling(self) -> SamplingConfig:
        """EAGLE switches top-p off outside [1e-8, 1), and top-k at 0."""
        top_p = self.top_p if 1e-8 <= self.top_p < 1 else 1.0
        return SamplingConfig(temperature=self.temperature, top_p=top_p, top_k=int(self.top_k), seed=self.seed)


class EagleFunctions(ABC):
    """`eagenerate`, `ea_generate`, `naivegenerate`, `naive_generate` with EAGLE's parameters and return forms.

    Unlike EAGLE's, the output never exceeds max_new_tokens or max_length and ends with the first stop id.
    input_ids: [1, L]. top_p, top_k: 0 is off. is_llama3: `<|eot_id|>` ends the response too. seed: None takes it from
    torch's global generator. relaxation_threshold: theta of the `mars` rule, None is exact; `verify` overrides it.
    """

    target: TargetModel
    tokenizer: Any
    stop_ids: frozenset[int]
    _engine: Engine

    def eagenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        relaxation_threshold: float | None = 0.9,
        verify: VerifyConfig | None = None,
        seed: int | None = None,
    ) -> Tensor | tuple[Tensor, int, int]:
        """The whole response: [1, L + new], or (ids, new tokens, index of the last cycle) with `log`."""
        options = _Options(temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed)
        ids = self._ids(input_ids)
        tokens, steps = _collect(self._ea_steps(ids, options, _rule(verify, relaxation_threshold)))
        # EAGLE's index counts cycles from 0; the step of the prefill is none.
        return (_append(ids, tokens), len(tokens), max(steps - 2, 0)) if log else _append(ids, tokens)

    def ea_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        relaxation_threshold: float | None = 0.9,
        verify: VerifyConfig | None = None,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """As `eagenerate`, yielding the growing ids after every cycle; `log` changes nothing, as in EAGLE."""
        options = _Options(temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed)
        ids = self._ids(input_ids)
        return _growing(ids, self._ea_steps(ids, options, _rule(verify, relaxation_threshold)))

    def naivegenerate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        seed: int | None = None,
    ) -> Tensor | tuple[Tensor, int, int]:
        """As `eagenerate`, by the target alone; the index counts tokens from 0."""
        options = _Options(temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed)
        ids = self._ids(input_ids)
        tokens, steps = _collect(self._ea_steps(ids, options, None))
        return (_append(ids, tokens), len(tokens), steps - 1) if log else _append(ids, tokens)

    def naive_generate(
        self,
        input_ids: Tensor,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: float = 0.0,
        max_new_tokens: int = 512,
        max_length: int = 2048,
        log: bool = False,
        is_llama3: bool = False,
        *,
        seed: int | None = None,
    ) -> Iterator[Tensor]:
        """As `naivegenerate`, yielding the growing ids after every token."""
        options = _Options(temperature, top_p, top_k, max_new_tokens, max_length, is_llama3, seed)
        ids = self._ids(input_ids)
        return _growing(ids, self._ea_steps(ids, options, None))

    def _ea_steps(self, ids: Tensor, options: _Options, verify: VerifyConfig | None) -> Iterator[Step]:
        """verify None: the target alone."""
        room = min(options.max_length, self.target.max_context) - ids.shape[1]
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {ids.shape[1]} tokens, which leaves no room below max_length={options.max_length} and "
                f"the target's context of {self.target.max_context}; shorten the prompt or raise max_length."
            )
        stop_ids = self.stop_ids
        if options.is_llama3:
            eot = self.tokenizer.convert_tokens_to_ids("<|eot_id|>")
            stop_ids |= {eot} - {None, self.tokenizer.unk_token_id}
        new = min(options.max_new_tokens, room)
        request = self._request(new, None, verify or VerifyConfig(rule="exact"), options.sampling, stop_ids)
        return self._engine.speculate(ids, request) if verify else self._engine.autoregress(ids, request)

    @abstractmethod
    def _ids(self, prompt: Any) -> Tensor:
        """Checked ids [1, L]."""

    @abstractmethod
    def _request(
        self,
        max_new_tokens: int,
        draft: DraftConfig | None,
        verify: VerifyConfig,
        sampling: SamplingConfig | None,
        stop_ids: Collection[int],
    ) -> Request:
        """Checked options of one response."""


def _rule(verify: VerifyConfig | None, threshold: float | None) -> VerifyConfig:
    return verify or VerifyConfig(rule="exact" if threshold is None else "mars", theta=threshold)


def _collect(steps: Iterator[Step]) -> tuple[list[int], int]:
    """All tokens, and the number of steps that gave them."""
    done = list(steps)
    return [token for step in done for token in step.tokens], len(done)


def _growing(ids: Tensor, steps: Iterator[Step]) -> Iterator[Tensor]:
    tokens: list[int] = []
    for step in steps:
        tokens += step.tokens
        yield _append(ids, tokens)


def _append(ids: Tensor, tokens: list[int]) -> Tensor:
    return torch.cat((ids, torch.tensor([tokens], dtype=ids.dtype, device=ids.device)), dim=1)
