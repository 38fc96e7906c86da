"""vLLM's model runner V2: a logits processor, loaded from the entry point group `vllm.logits_processors`.

V2 shows a processor the target's rows of a verification step after penalties and masks, before temperature: where
`eagle_mars.engines.rewrite` belongs. The class also answers for V1, which loads the same group: there it admits or
refuses requests and does nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from eagle_mars.engines.request import PREFIX, MarsRequest
from eagle_mars.engines.vllm_common import active_default, announce, is_wrapped, protected_mask, require_parameters
from eagle_mars.engines.vllm_counts import RelaxedCounts
from eagle_mars.engines.vllm_rows import STRICT, RowRule, check, rewrite, row_rule
from eagle_mars.errors import ConfigError, EngineError

try:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
except ImportError:  # an older vLLM: all that it can do with the class is to load it, and it may serve without MARS
    LogitsProcessor = object

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams

_NOT_LOADED = "MARS's general plugin isn't loaded: add eagle_mars to VLLM_PLUGINS."


@dataclass(frozen=True)
class _Step:
    """Rows [R] rewritten in a step that isn't committed yet, on the device, and the names of the batch's requests."""

    names: list[str]
    slots: Tensor
    owner: Tensor
    position_in_text: Tensor
    rows: Tensor


class MarsLogitsProcessor(LogitsProcessor):
    """MARS in vLLM; inert without speculation, without the option `eagle_mars`, and in model runner V1."""

    _front_default: ClassVar[MarsRequest | None] = None
    _front_known: ClassVar[bool] = False

    @classmethod
    def admit_with(cls, default: MarsRequest | None) -> None:
        """Called in an engine's front before it takes requests; None is an engine without MARS.

        One per process: `validate_params` isn't told whose request it sees.
        """
        cls._front_default, cls._front_known = default, True

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise `ConfigError`, a ValueError, at admission: the client's 400."""
        if not cls._front_known and any(name.startswith(PREFIX) for name in sampling_params.extra_args or {}):
            raise ConfigError(_NOT_LOADED)
        check(sampling_params, cls._front_default)

    @classmethod
    def of(cls, runner: Any) -> MarsLogitsProcessor:
        """The processor that a V2 runner has built. Raises `EngineError` if it has none, or other samplers."""
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

        for found, known in ((runner.sampler, Sampler), (runner.rejection_sampler, RejectionSampler)):
            if type(found) is not known:
                raise EngineError(
                    f"MARS can't be put before {type(found).__qualname__}; it knows vLLM's {known.__name__}."
                )
        own = [processor for processor in runner.sampler.logits_processors if isinstance(processor, cls)]
        if len(own) != 1:
            raise EngineError(f"The sampler holds {len(own)} MARS processors; leave it out of --logits-processors.")
        return own[0]

    def __init__(self, vllm_config: VllmConfig, state: Any, is_pin_memory: bool | None = None) -> None:
        """V2 gives its request state; V1 a device and whether memory is pinned, and its engine never speculates."""
        self._rules: dict[int, RowRule] = {}
        self._default = active_default(vllm_config)
        if self._default is None or is_pin_memory is not None:
            return
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        if not is_wrapped(WorkerWrapperBase, "initialize_from_config"):
            raise ConfigError(_NOT_LOADED)
        require_parameters(LogitsProcessor, "apply", ("self", "logits", "ctx"))
        require_parameters(LogitsProcessor, "add_request", ("self", "req_idx", "sampling_params"))
        self._config = vllm_config
        self._total_length = state.total_len
        self._protected = protected_mask(vllm_config, state.vocab_size, state.device)
        # One row per slot, and a strict one for padding, whose slot is -1.
        self._numbers = torch.tensor([STRICT.numbers()], dtype=torch.float64, device=state.device)
        self._numbers = self._numbers.repeat(state.max_num_reqs + 1, 1)
        self._staged: dict[int, RowRule] = {}
        self._counts: RelaxedCounts | None = None
        self._names: dict[int, str] = {}
        self._steps: list[_Step] = []

    def attach(self, runner: Any, default: MarsRequest) -> None:
        """The worker is built: from now on requests have names, and relaxed tokens are counted."""
        from eagle_mars.engines.vllm_v1 import counts_here

        self._name_of = runner.req_states.index_to_req_id
        if counts_here(sharded=runner.batch_sharder is not None):
            self._counts = RelaxedCounts(
                self._config.model_config.model, runner.req_states.req_id_to_index.__contains__
            )
        announce(default, "the sampler of model runner V2")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether rows of the slot's new request may be rewritten."""
        if self._default is None:
            return False
        self._settle()
        try:
            rule = row_rule(sampling_params, self._default)
        except ConfigError:  # admission lets none in; an exception here would end the engine
            rule = STRICT
        self._rules[req_idx] = self._staged[req_idx] = rule
        if self._counts is not None:
            self._names[req_idx] = name = self._name_of.get(req_idx, "warm-up")
            self._counts.begin(name)
        return rule is not STRICT

    def apply_staged_writes(self) -> None:
        """Once per step, before the target runs: the step before is committed by then, in the device's order."""
        if self._default is None:
            return
        self._settle()
        if self._staged:
            from vllm.utils.torch_utils import async_tensor_h2d

            device = self._numbers.device
            slots = async_tensor_h2d(list(self._staged), device=device, dtype=torch.long)
            numbers = [rule.numbers() for rule in self._staged.values()]
            self._numbers[slots] = async_tensor_h2d(numbers, device=device, dtype=torch.float64)
            self._staged = {}

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        """logits: [R, V] float32, R rows of the batch's requests, one per draft and one more each."""
        if self._default is None:
            return logits
        slots = ctx.idx_mapping_np.tolist()
        rules = [self._rules.get(slot, STRICT) for slot in slots]
        if len(slots) == len(logits) or all(rule is STRICT for rule in rules):  # no drafts, or nothing to relax
            return logits
        owner, position = ctx.expanded_idx_mapping.long(), ctx.expanded_local_pos.long()
        drafts = _drafts(ctx.input_ids.long(), owner)
        rows = rewrite(logits, drafts, position, self._numbers[owner], rules, self._protected)
        if self._counts is not None:
            names = [self._names[slot] for slot in slots]
            self._steps.append(_Step(names, ctx.idx_mapping.long(), owner, ctx.pos, rows))
        return logits

    def is_argmax_invariant(self) -> bool:
        """V1's question; it only gets here without speculation, where `apply` leaves logits alone."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """V1 tells what entered and left its batch: nothing to do."""

    def _settle(self) -> None:
        """Count the rows of committed steps: the draft behind text position i is kept if a token follows it."""
        if self._counts is None:
            return
        for step in self._steps:
            length, owner = self._total_length.gpu, step.owner.clamp(min=0)  # padding is never rewritten
            kept = (step.rows & (step.position_in_text + 2 < length[owner])).long()
            relaxed = torch.zeros(len(length), dtype=torch.long, device=kept.device).index_add(0, owner, kept)
            self._counts.add(step.names, relaxed[step.slots])
        self._steps = []
        self._counts.collect()


def _drafts(input_ids: Tensor, owner: Tensor) -> Tensor:
    """[R]: the draft that each row verifies, which is the next row's input where both are of one request; else -1."""
    drafts = torch.where(owner[1:] == owner[:-1], input_ids[1:], -1)
    return torch.nn.functional.pad(drafts, (0, 1), value=-1)
