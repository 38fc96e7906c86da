"""What both of vLLM's model runners share: the server's default, what is refused at start, protected tokens."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import eagle_mars
from eagle_mars.config import VerifyConfig
from eagle_mars.engines.protection import protected_ids
from eagle_mars.engines.request import MarsRequest
from eagle_mars.errors import ConfigError, EngineError
from eagle_mars.verify.guarantee import guarantee

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KNOWN_VERSIONS = ("0.32", "0.33")
OPTION = "eagle_mars"
_EXAMPLE = """--additional-config '{"eagle_mars": {"theta": 0.9}}'"""

# A child of vLLM's own logger: its level and handlers are the ones that the server shows.
logger = logging.getLogger("vllm.eagle_mars")


def server_default(config: VllmConfig) -> MarsRequest | None:
    """The default of requests that say nothing; None where MARS is off, and the plugin with it.

    `additional_config["eagle_mars"]` holds it, an empty object being a strict default. It travels to every rank, which
    the environment's `EAGLE_MARS` does only where the launcher copies it. Raises `ConfigError`.
    """
    additional = config.additional_config
    options = additional.get(OPTION) if isinstance(additional, dict) else None
    if options is None:
        return MarsRequest.default_from_environment(os.environ)
    if not isinstance(options, dict):
        raise ConfigError(f"additional_config {OPTION}={options!r} is not an object; write e.g. {_EXAMPLE}.")
    return MarsRequest.default_from(options)


def active_default(config: VllmConfig) -> MarsRequest | None:
    """`server_default` of an engine that speculates and may be trusted with it; None where there is nothing to do.

    Raises `ConfigError` or `EngineError`, in one sentence, for whatever the plugin must not run with.
    """
    default = server_default(config)
    if default is None or config.speculative_config is None:
        return None
    _require_known_version()
    _require_plain_verification(config)
    return default


def require_parameters(owner: type, method: str, names: tuple[str, ...]) -> None:
    """Raise `EngineError` unless the method exists with exactly these parameters."""
    found = getattr(owner, method, None)
    if found is None or tuple(inspect.signature(found).parameters) != names:
        raise EngineError(
            f"vLLM's {owner.__module__}.{owner.__qualname__}.{method} is not the one of vLLM {_known()}, so MARS can't "
            "be put before it; install one of these versions."
        )


def protected_mask(config: VllmConfig, vocab_size: int, device: torch.device) -> Tensor:
    """[V] bool: EOS, special tokens and all tokens added to the vocabulary: roles, tool calls, thinking.

    Raises `ConfigError` without a tokenizer, which is what knows them.
    """
    from vllm.tokenizers import cached_tokenizer_from_config

    stop: set[int | None] = set()
    for source in (config.model_config.try_get_generation_config(), config.model_config.hf_text_config.to_dict()):
        ends = source.get("eos_token_id")
        stop |= set(ends if isinstance(ends, list) else [ends])
    ids = protected_ids(cached_tokenizer_from_config(config.model_config), stop)
    if ids is None:
        raise ConfigError("MARS protects the tokenizer's special tokens: start without --skip-tokenizer-init.")
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[[i for i in ids if i < vocab_size]] = True
    return mask.to(device)


def announce(default: MarsRequest, hook: str) -> None:
    """Say once per worker that requests may be relaxed, where, and what that means."""
    import vllm

    promise = "strict unless a request asks for more"
    if not default.strict:
        promise = guarantee(VerifyConfig(**default.model_dump(include={"theta", "margin", "gap"}, exclude_none=True)))
    logger.warning(
        "eagle_mars %s is on in vLLM %s, before %s. Default: %s",
        eagle_mars.__version__,
        vllm.__version__,
        hook,
        promise,
    )


def wrap(owner: type, method: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by `around(method)`, once per process however often plugins are loaded."""
    if not is_wrapped(owner, method):
        wrapped = around(getattr(owner, method))
        wrapped.wrapped_by_eagle_mars = True  # type: ignore[attr-defined]
        setattr(owner, method, wrapped)


def is_wrapped(owner: type, method: str) -> bool:
    """Whether `wrap` has replaced the method in this process."""
    return getattr(getattr(owner, method), "wrapped_by_eagle_mars", False)


def _known() -> str:
    return " or ".join(KNOWN_VERSIONS)


def _require_known_version() -> None:
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) not in KNOWN_VERSIONS:
        raise EngineError(
            f"eagle_mars knows vLLM {_known()}, and this is {vllm.__version__}; install one of these, or leave "
            f"{OPTION} out of --additional-config and EAGLE_MARS unset."
        )


def _require_plain_verification(config: VllmConfig) -> None:
    speculation, model = config.speculative_config, config.model_config
    method = speculation.rejection_sample_method
    if method != "standard":
        raise ConfigError(
            f"MARS rewrites rows for rejection_sample_method 'standard', not {method!r}: choose one of the two."
        )
    refused = {
        "enable_adaptive_verification": speculation.enable_adaptive_verification,
        "watermarking": config.watermark_config is not None,
        "--return-sampling-mask": model.return_sampling_mask,
        f"--logprobs-mode {model.logprobs_mode}": model.logprobs_mode.startswith("processed_"),
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(f"MARS rewrites rows that {name} reads: switch {name} off, or MARS.")
