"""SGLang, before any work is done: what a server must not run with, and what a request may ask for."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from typing import Any

import eagle_mars
from eagle_mars.engines.request import ENVIRONMENT, PREFIX, MarsRequest
from eagle_mars.errors import ConfigError
from eagle_mars.verify.guarantee import guarantee

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
ADMITTED = "__eagle_mars"  # the request's resolved options in custom_params, so that every rank reads the same
_UNFIT = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "watermark")

logger = logging.getLogger("sglang.eagle_mars")


def admit(params: Any, default: MarsRequest) -> None:
    """Resolve the `mars_*` entries of a request's `custom_params`; the scheduler reads nothing else.

    params: SGLang's `SamplingParams`. With structured output, logit bias or a watermark a request is strict.
    Raises `ConfigError` (a `ValueError`, so a 400) for an option that isn't usable or asks to relax such a request.
    """
    args = params.custom_params if isinstance(params.custom_params, dict) else {}
    request = MarsRequest.parse(args, default)
    named = any(name.startswith(PREFIX) for name in args)
    unfit = next((name for name in _UNFIT if getattr(params, name) is not None), None)
    if unfit and not request.strict:
        if named:
            raise ConfigError(f"A request with {unfit} is never relaxed; leave out {unfit} or the mars_* options.")
        request = MarsRequest()
    kept = {name: value for name, value in args.items() if name != ADMITTED}
    if named or not request.strict:
        params.custom_params = {**kept, ADMITTED: request.model_dump(exclude_defaults=True)}
    elif len(kept) < len(args):
        params.custom_params = kept


def admitted(params: Any) -> MarsRequest | None:
    """What `admit` resolved; None where the request and the server's default said nothing, which is strict."""
    args = params.custom_params
    options = args.get(ADMITTED) if isinstance(args, dict) else None
    return None if options is None else _request(json.dumps(options))


@lru_cache(maxsize=1024)
def _request(options: str) -> MarsRequest:
    try:
        return MarsRequest.default_from(json.loads(options))
    except ConfigError:
        # A front end that skips `admit` let something else through, and the scheduler is no place to raise.
        logger.warning("%s=%s was never admitted: such a request is strict.", ADMITTED, options)
        return MarsRequest()


def check_server(settings: Any, environment: Any, default: MarsRequest, version: str) -> None:
    """Raise `ConfigError` for a server that MARS must not run in, and say once what it does in one that it may.

    settings: SGLang's resolved server arguments. environment: its `envs`. version: its own.
    """
    algorithm = settings.speculative_algorithm
    if algorithm is None:
        logger.warning("%s is set, but the server doesn't speculate: MARS has nothing to relax.", ENVIRONMENT)
        return
    if algorithm not in ALGORITHMS:
        raise ConfigError(
            f"MARS knows --speculative-algorithm {', '.join(ALGORITHMS)}, not {algorithm}; "
            f"choose one of these or unset {ENVIRONMENT}."
        )
    # The first four change what acceptance means; the others keep plugins or tokenizers away from requests.
    refused = {
        "--speculative-accept-threshold-single below 1": settings.speculative_accept_threshold_single < 1,
        "--speculative-accept-threshold-acc below 1": settings.speculative_accept_threshold_acc < 1,
        "--speculative-use-block-verification": settings.speculative_use_block_verification,
        "--enable-watermark": settings.enable_watermark,
        "--skip-tokenizer-init": settings.skip_tokenizer_init,
        "--tokenizer-worker-num above 1": settings.tokenizer_worker_num > 1,
        "--smg-grpc-mode": settings.smg_grpc_mode,
        "SGLANG_RUST_SERVER": environment.SGLANG_RUST_SERVER.get(),
        "SGLANG_SIMULATE_ACC_LEN": environment.SGLANG_SIMULATE_ACC_LEN.get() > 0,
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(f"MARS can't be combined with {name}; leave it out or unset {ENVIRONMENT}.")
    promise = "strict unless a request asks for more." if default.strict else guarantee(default.verify_config())
    logger.warning(
        "eagle_mars %s is on in SGLang %s, before the verifier of eagle_sample. Default: %s",
        eagle_mars.__version__,
        version,
        promise,
    )
