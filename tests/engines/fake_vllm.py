"""As much of vLLM as our plugin touches, so that its refusals are tested without an engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

VOCABULARY = 12
END = 11


@dataclass
class SamplingParams:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    extra_args: dict[str, Any] | None = None
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None


class Tokenizer:
    all_special_ids = (END,)

    def get_added_vocab(self) -> dict[str, int]:
        return {"<|end|>": END, "<think>": 10}


def config(additional: Any = None, speculation: Any = "standard", v2: bool = False, **model: Any) -> SimpleNamespace:
    """A `VllmConfig`; speculation is a rejection_sample_method, a namespace, or None."""
    if isinstance(speculation, str):
        speculation = SimpleNamespace(rejection_sample_method=speculation, enable_adaptive_verification=False)
    settings = {
        "logprobs_mode": "raw_logprobs",
        "return_sampling_mask": False,
        "model": "tiny",
        "tokenizer": Tokenizer(),
    }
    return SimpleNamespace(
        additional_config={} if additional is None else {"eagle_mars": additional},
        speculative_config=speculation,
        watermark_config=None,
        use_v2_model_runner=v2,
        model_config=SimpleNamespace(
            **{**settings, **model},
            hf_text_config=SimpleNamespace(to_dict=lambda: {"eos_token_id": END}),
            try_get_generation_config=lambda: {"eos_token_id": [END, 9]},
            get_vocab_size=lambda: VOCABULARY,
        ),
    )


class InputProcessor:
    def __init__(self, vllm_config: Any, renderer: Any = None) -> None:
        self.vllm_config = vllm_config


class WorkerWrapperBase:
    def __init__(self, vllm_config: Any, runner: Any) -> None:
        self.vllm_config = vllm_config
        self.worker = SimpleNamespace(model_runner=runner)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """As in vLLM, but without a cache."""


class RejectionSampler(torch.nn.Module):
    """V1's, greedy only."""

    def apply_logits_processors(self, logits: Any, sampling_metadata: Any, metadata: Any) -> Any:
        return logits

    def forward(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        best = self.apply_logits_processors(logits.clone(), sampling_metadata, metadata).argmax(-1)
        rows, start = [], 0
        for count in metadata.num_draft_tokens:
            drafts = metadata.draft_token_ids[start : start + count].tolist()
            chosen = best[start : start + count].tolist()
            wrong = [at for at in range(count) if drafts[at] != chosen[at]]
            kept = [*drafts[: wrong[0]], chosen[wrong[0]]] if wrong else [*drafts, 0]
            rows.append(kept + [-1] * (1 + max(metadata.num_draft_tokens) - len(kept)))
            start += count
        return SimpleNamespace(sampled_token_ids=torch.tensor(rows))


class LogitsProcessor:
    """V2's."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        raise NotImplementedError

    def apply(self, logits: Any, ctx: Any) -> Any:
        raise NotImplementedError


class V2Sampler:
    def __init__(self, processors: list[Any]) -> None:
        self.logits_processors = processors


class V2RejectionSampler:
    pass


@dataclass
class V1Runner:
    requests: dict[str, Any]
    rejection_sampler: Any = field(default_factory=RejectionSampler)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def input_batch(self) -> SimpleNamespace:
        return SimpleNamespace(req_ids=list(self.requests))


def install(patch: pytest.MonkeyPatch, version: str = "0.32.0", without: tuple[str, ...] = ()) -> None:
    """Put the fakes where our modules import them from, and our modules that have imported anything out of the way."""
    for name in list(sys.modules):
        if name.startswith(("eagle_mars.engines.vllm_v", "vllm")):
            patch.delitem(sys.modules, name)
    rank = SimpleNamespace(is_last_rank=True, rank_in_group=0)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.tokenizers": {"cached_tokenizer_from_config": lambda model: model.tokenizer},
        "vllm.distributed.parallel_state": {"get_pp_group": lambda: rank, "get_tp_group": lambda: rank},
        "vllm.utils.torch_utils": {"async_tensor_h2d": lambda data, device, dtype: torch.tensor(data, dtype=dtype)},
        "vllm.v1.engine.input_processor": {"InputProcessor": _copy(InputProcessor)},
        "vllm.v1.worker.worker_base": {"WorkerWrapperBase": _copy(WorkerWrapperBase)},
        "vllm.v1.sample.rejection_sampler": {"RejectionSampler": RejectionSampler},
        "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "vllm.v1.worker.gpu.sample.sampler": {"Sampler": V2Sampler},
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler": {"RejectionSampler": V2RejectionSampler},
    }
    for name, names in contents.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in sys.modules:
                module = ModuleType(path)
                module.__path__ = []
                patch.setitem(sys.modules, path, module)
        if name not in without:
            vars(sys.modules[name]).update(names)


def _copy(cls: type) -> type:
    """A class whose methods a test may have replaced without the next one seeing it."""
    return type(cls.__name__, (), dict(vars(cls)))
