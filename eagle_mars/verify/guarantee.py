"""What each rule promises, in one sentence: the words that command line, server and documents show."""

from __future__ import annotations

import logging

from eagle_mars.config import VerifyConfig

_LOSSY = {
    "mars-paper": "Lossy: takes the target's top-1, or its runner-up where the margin is low, at any temperature",
    "mars-released": "Lossy, for reproduction only: the law of the released MARS code, biased even without relaxation",
    "typical": "Lossy: accepts every draft that is likely enough for the target's entropy (Medusa)",
    "topk-delta": "Lossy: accepts drafts among the best tokens with a probability near the top-1's (TensorRT-LLM)",
    "prob-ratio": "Lossy: accepts drafts among the best tokens with a given share of the top-1's probability (vLLM)",
}

_logger = logging.getLogger("eagle_mars.guarantee")
_announced: set[str] = set()


def guarantee(config: VerifyConfig) -> str:
    """One sentence about the distribution of the text under `config`."""
    if not config.relaxes:
        return "Lossless: the text is distributed exactly as the target's own."
    if config.rule != "mars":
        return _LOSSY[config.rule] + "."
    margin = f"z1 - z2 < {config.gap:g} nats" if config.margin == "logit-gap" else f"z2/z1 > {config.theta:g}"
    return (
        f"Lossy: a rejected draft is accepted where the target is undecided ({margin}); without such a token, lossless."
    )


def announce(config: VerifyConfig) -> None:
    """Say once per process, in words, that the text may differ from the target's own."""
    promise = guarantee(config)
    if config.relaxes and promise not in _announced:
        _announced.add(promise)
        _logger.warning("relaxed verification is on. %s", promise)
