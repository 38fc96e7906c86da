"""As much of SGLang 0.5.23 as the plugin touches, in `sys.modules`: names and signatures are the real ones' (the real
sources are checked by `tests/engines_e2e`)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Hook = tuple[str, Callable[..., Any], "HookType"]


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class SamplingParams:
    """Fields that admission reads; everything else is SGLang's own affair."""

    def __init__(self, custom_params: object = None, top_k: int = 1, **named: object) -> None:
        for name in ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "watermark"):
            setattr(self, name, named.pop(name, None))
        assert not named
        self.custom_params, self.top_k = custom_params, top_k

    def verify(self, vocab_size: int) -> None: ...


class ServerArgs:
    def check_server_args(self) -> None: ...


def eagle_sample(
    verify_input: Any,
    batch: Any,
    logits_output: Any,
    grammar_mask: Any = None,
    uno_target_max_top_k: Any = None,
    *,
    watermark_state: Any = None,
    watermark_full_mask: bool = True,
) -> Any: ...


def verify_tree_greedy_func(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrieve_index: Any,
    retrieve_next_token: Any,
    retrieve_next_sibling: Any,
    target_predict: Any,
    topk: int = -1,
) -> Any: ...


def tree_speculative_sampling_target_only(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    uniform_samples: Any,
    uniform_samples_for_final_sampling: Any,
    target_probs: Any,
    draft_probs: Any,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None: ...


def chain_speculative_sampling_triton(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    uniform_samples: Any,
    uniform_samples_for_final_sampling: Any,
    target_probs: Any,
    draft_probs: Any,
    threshold_single: Any,
    threshold_acc: Any,
    deterministic: Any,
    *,
    block_verification: bool = False,
) -> None: ...


@dataclass
class FakeSGLang:
    """modules: by dotted name. hooks: what was registered, in order. patched: the targets where that succeeded."""

    modules: dict[str, ModuleType]
    hooks: list[Hook] = field(default_factory=list)
    patched: set[str] = field(default_factory=set)
    parallel: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(pp_size=1, attn_tp_rank=0))
    observability: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(enable_metrics=True))

    def hook(self, name: str) -> Callable[..., Any]:
        """The hook on the target whose last name is `name`."""
        return next(hook for target, hook, _ in self.hooks if target.endswith(f".{name}"))


def install_fake(monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> FakeSGLang:
    """Put the fake in place of SGLang for one test."""
    fake = FakeSGLang({})

    def module(name: str, **content: object) -> None:
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            dotted = ".".join(parts[:depth])
            if dotted not in fake.modules:
                made = fake.modules[dotted] = ModuleType(dotted)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, dotted, made)
                if depth > 1:
                    setattr(fake.modules[".".join(parts[: depth - 1])], parts[depth - 1], made)
        for key, value in content.items():
            setattr(fake.modules[name], key, value)

    class HookRegistry:
        _patched = fake.patched

        @staticmethod
        def register(target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
            fake.hooks.append((target, hook, hook_type))
            fake.patched.add(target)

    module("sglang", __version__=version)
    module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    module("sglang.srt.sampling.sampling_params", SamplingParams=SamplingParams)
    module("sglang.srt.server_args", ServerArgs=ServerArgs)
    module(
        "sglang.srt.speculative.eagle_utils",
        eagle_sample=eagle_sample,
        verify_tree_greedy_func=verify_tree_greedy_func,
        tree_speculative_sampling_target_only=tree_speculative_sampling_target_only,
        chain_speculative_sampling_triton=chain_speculative_sampling_triton,
    )
    module("sglang.srt.managers.auxiliary_output", append_auxiliary_output=lambda current, output: output)
    module(
        "sglang.srt.runtime_context",
        get_parallel=lambda: fake.parallel,
        get_observability=lambda: fake.observability,
    )
    return fake
