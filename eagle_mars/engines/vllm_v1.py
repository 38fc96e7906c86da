"""vLLM's model runner V1, and the general plugin that vLLM calls in each of its processes.

V1 has no place for a logits processor beside speculation. Its rejection sampler has one method between the target's
logits and the test of the drafts, `apply_logits_processors`; once the worker is built, that object gets a subclass that
rewrites the rows there. No kernel and no runner is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle_mars.engines.request import MarsRequest
from eagle_mars.engines.vllm_common import (
    active_default,
    announce,
    protected_mask,
    require_parameters,
    wrap,
)
from eagle_mars.engines.vllm_counts import RelaxedCounts
from eagle_mars.engines.vllm_rows import STRICT, RowRule, rewrite, row_rule
from eagle_mars.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


def register() -> None:
    """Entry point of `vllm.general_plugins`: wait for the engine's configuration, in its front and in its workers.

    Raises `EngineError` on a vLLM without these two places, where a configuration that asks for MARS would go unseen.
    """
    try:
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.worker.worker_base import WorkerWrapperBase
    except ImportError as error:
        raise EngineError(
            f"eagle_mars doesn't know this vLLM ({error}); install vLLM 0.32 or 0.33, or name the other plugins in "
            "VLLM_PLUGINS."
        ) from error
    require_parameters(WorkerWrapperBase, "initialize_from_config", ("self", "kv_cache_configs"))
    wrap(InputProcessor, "__init__", _checking_front)
    wrap(WorkerWrapperBase, "initialize_from_config", _relaxing_worker)


def _checking_front(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def init(self: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        from eagle_mars.engines.vllm_v2 import MarsLogitsProcessor

        MarsLogitsProcessor.admit_with(active_default(vllm_config))
        stock(self, vllm_config, *args, **kwargs)

    return init


def _relaxing_worker(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def initialize_from_config(self: Any, kv_cache_configs: list[Any]) -> None:
        stock(self, kv_cache_configs)
        default = active_default(self.vllm_config)
        if default is not None:
            _activate(self.worker.model_runner, self.vllm_config, default)

    return initialize_from_config


def _activate(runner: Any, config: VllmConfig, default: MarsRequest) -> None:
    from vllm.distributed.parallel_state import get_pp_group

    if not get_pp_group().is_last_rank:  # the others have no logits
        return
    if config.use_v2_model_runner:
        from eagle_mars.engines.vllm_v2 import MarsLogitsProcessor

        MarsLogitsProcessor.of(runner).attach(runner, default)
    else:
        attach(runner, config, default)


def attach(runner: Any, config: VllmConfig, default: MarsRequest) -> None:
    """Let a V1 runner's rejection sampler rewrite rows. Raises `EngineError` if it isn't the one that we know."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    sampler: Any = getattr(runner, "rejection_sampler", None)
    if type(sampler) is not RejectionSampler:
        raise EngineError(f"MARS can't be put before {type(sampler).__qualname__}; it knows vLLM's RejectionSampler.")
    require_parameters(RejectionSampler, "forward", ("self", "metadata", "draft_probs", "logits", "sampling_metadata"))
    hook = ("self", "logits", "sampling_metadata", "metadata")
    require_parameters(RejectionSampler, "apply_logits_processors", hook)
    sampler.mars = _Rewriter(runner, config, default)
    sampler.__class__ = _relaxing(RejectionSampler)
    announce(default, "RejectionSampler of model runner V1")


def counts_here(sharded: bool) -> bool:
    """Whether this rank counts: all ranks see the same rows, unless each samples its own shard of the batch."""
    from vllm.distributed.parallel_state import get_tp_group

    return sharded or get_tp_group().rank_in_group == 0


def _relaxing(stock: type) -> type:
    class MarsRejectionSampler(stock):
        mars: _Rewriter

        def apply_logits_processors(self, logits: Tensor, sampling_metadata: Any, metadata: Any) -> Tensor:
            logits = super().apply_logits_processors(logits, sampling_metadata, metadata)
            self.mars.rewrite(logits, metadata)
            return logits

        def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
            output = super().forward(metadata, draft_probs, logits, sampling_metadata)
            self.mars.count(output.sampled_token_ids)
            return output

    return MarsRejectionSampler


class _Rewriter:
    """The rows of a V1 runner's requests: which rule each has, and how many were relaxed."""

    def __init__(self, runner: Any, config: VllmConfig, default: MarsRequest) -> None:
        self._runner = runner
        self._default = default
        self._rules: dict[str, RowRule] = {}
        self._protected = protected_mask(config, config.model_config.get_vocab_size(), runner.device)
        self._counts = None
        if counts_here(sharded=False):
            self._counts = RelaxedCounts(config.model_config.model, runner.requests.__contains__)
        self._rows: tuple[Tensor, Tensor, Tensor] | None = None

    def rewrite(self, logits: Tensor, metadata: SpecDecodeMetadata) -> None:
        """logits: [R, V], R drafts in the order of the batch's requests."""
        self._rows = None
        names = self._runner.input_batch.req_ids
        drafted = metadata.num_draft_tokens
        if len(names) != len(drafted):  # the engine's warm-up, which has no requests
            return
        self._rules = {name: self._rules.get(name) or self._rule(name) for name in names}
        rules = list(self._rules.values())
        if all(rule is STRICT for rule in rules):
            return
        owner = torch.arange(len(names)).repeat_interleave(torch.tensor(drafted))
        start = torch.tensor(metadata.num_draft_tokens).cumsum(0) - torch.tensor(drafted)
        position = torch.arange(len(owner)) - start[owner]
        numbers = torch.tensor([rule.numbers() for rule in rules], dtype=torch.float64)[owner]
        device = logits.device
        owner, position = owner.to(device, non_blocking=True), position.to(device, non_blocking=True)
        numbers = numbers.to(device, non_blocking=True)
        drafts = metadata.draft_token_ids.long()
        rows = rewrite(logits, drafts, position, numbers, rules, self._protected)
        self._rows = rows, owner, position

    def count(self, sampled: Tensor) -> None:
        """sampled: [B, most drafts + 1], accepted drafts and one more token, then padded with -1."""
        if self._counts is None:
            return
        if self._rows is not None:
            rows, owner, position = self._rows
            accepted = (sampled != -1).sum(1) - 1
            taken = (rows & (position < accepted[owner])).long()
            relaxed = torch.zeros(len(sampled), dtype=torch.long, device=sampled.device).index_add(0, owner, taken)
            self._counts.add(list(self._rules), relaxed)
        self._counts.collect()

    def _rule(self, name: str) -> RowRule:
        if self._counts is not None:
            self._counts.begin(name)
        try:
            return row_rule(self._runner.requests[name].sampling_params, self._default)
        except ConfigError:  # admission lets none in; an exception here would end the engine
            return STRICT
