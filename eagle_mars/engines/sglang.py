"""MARS in SGLang, on real draft trees: a plugin of entry point group `sglang.srt.plugins`, on where EAGLE_MARS is set.

SGLang logs an exception of a plugin or a hook and serves on without it. So everything that a hook relies on is checked
here, before any is registered, and a mismatch ends the process: a server that was told to relax never runs strict
without a word, and one that doesn't fit never relaxes by luck.
"""

from __future__ import annotations

import inspect
import os
from functools import partial
from pkgutil import resolve_name
from typing import Any

from eagle_mars.engines.request import ENVIRONMENT, MarsRequest
from eagle_mars.errors import EagleMarsError, EngineError

KNOWN_VERSIONS = ("0.5.23",)

_VERIFIER = ("predicts", "accept_index", "accept_token_num", "candidates")
_SAMPLER = (
    *_VERIFIER, "retrive_index", "retrive_next_token", "retrive_next_sibling", "uniform_samples",
    "uniform_samples_for_final_sampling", "target_probs", "draft_probs", "threshold_single", "threshold_acc",
    "deterministic",
)  # fmt: skip
_EAGLE = "sglang.srt.speculative.eagle_utils"
_ADMISSION = "sglang.srt.sampling.sampling_params.SamplingParams.verify"
_START = "sglang.srt.server_args.ServerArgs.check_server_args"
_SAMPLE = f"{_EAGLE}.eagle_sample"
_GREEDY = f"{_EAGLE}.verify_tree_greedy_func"
_TREE = f"{_EAGLE}.tree_speculative_sampling_target_only"  # None where the platform has no kernel for it
_CHAIN = f"{_EAGLE}.chain_speculative_sampling_triton"
PARAMETERS = {
    _ADMISSION: ("self", "vocab_size"),
    _START: ("self",),
    _SAMPLE: (
        "verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k", "watermark_state",
        "watermark_full_mask",
    ),
    _GREEDY: (
        *_VERIFIER, "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "target_predict", "topk",
    ),
    _TREE: _SAMPLER,
    _CHAIN: (*_SAMPLER, "block_verification"),
}  # fmt: skip


def load() -> None:
    """Entry point: register the hooks, or end the process with one sentence that names what to change."""
    try:
        default = MarsRequest.default_from_environment(os.environ)
        if default is not None:
            install(default)
    except EagleMarsError as error:
        # SGLang catches every Exception of a plugin, logs it and goes on without the plugin.
        raise SystemExit(f"eagle_mars: {error}") from error


def install(default: MarsRequest) -> None:
    """Register the hooks with SGLang. Raises `EngineError` for an SGLang that isn't one of `KNOWN_VERSIONS`."""
    import sglang

    known = ", ".join(KNOWN_VERSIONS)
    if sglang.__version__ not in KNOWN_VERSIONS:
        raise EngineError(
            f"MARS knows SGLang {known}, and this is {sglang.__version__}; install a known one or unset {ENVIRONMENT}."
        )
    present = [target for target, names in PARAMETERS.items() if _is_as_known(target, names)]

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle_mars.engines import sglang_verify as verify

    hooks = {
        _ADMISSION: (partial(_admit, default), HookType.AFTER),
        _START: (partial(_start, default, sglang.__version__, present), HookType.AFTER),
        _SAMPLE: (verify.around_sample, HookType.AROUND),
        _GREEDY: (verify.inside_step(verify.prepare_greedy), HookType.AROUND),
        _TREE: (verify.inside_step(verify.prepare_tree_sampling), HookType.AROUND),
        _CHAIN: (verify.inside_step(verify.prepare_chain_sampling), HookType.AROUND),
    }
    for target in present:
        hook, kind = hooks[target]
        HookRegistry.register(target, hook, kind)


def _is_as_known(target: str, names: tuple[str, ...]) -> bool:
    """Whether there is something to hook; raises `EngineError` where it isn't what the known versions have."""
    try:
        found: Any = resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise _unknown(target) from error
    if found is None and target == _TREE:
        return False
    if not callable(found) or tuple(inspect.signature(found).parameters) != names:
        raise _unknown(target)
    return True


def _unknown(target: str) -> EngineError:
    known = ", ".join(KNOWN_VERSIONS)
    return EngineError(
        f"SGLang's {target} is not the one of SGLang {known}, so MARS can't be put before it; "
        f"install that version unchanged or unset {ENVIRONMENT}."
    )


def _admit(default: MarsRequest, _result: None, params: Any, _vocab_size: int) -> None:
    from eagle_mars.engines.sglang_admission import admit

    admit(params, default)


def _start(default: MarsRequest, version: str, targets: list[str], _result: None, arguments: Any) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in targets if target not in HookRegistry._patched]
    if missing:  # SGLang has only logged why
        raise EngineError(f"SGLang couldn't put MARS before {missing[0]}; see its log, or unset {ENVIRONMENT}.")

    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.environ import envs

    from eagle_mars.engines.sglang_admission import check_server

    check_server(resolving_view(arguments), envs, default, version)
