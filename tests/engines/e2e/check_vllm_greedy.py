"""vLLM with the embedded pair at temperature 0: what MARS changes, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from eagle_mars.embedded import embedded_target_path
from eagle_mars.engines.request import MarsRequest
from tests.engines.e2e.conftest import DEFAULT_THETA, OPTIONS

# fp32 logits of up to 30 from two implementations that sum in different orders.
NOISE = 2e-3
DRAFTS = 4


def test_theta_one_is_the_engine_without_the_plugin(plain: dict, v1: dict) -> None:
    assert v1["strict"]["tokens"] == plain["tokens"]
    assert v1["strict"]["steps"] == plain["steps"]
    assert v1["strict"]["relaxed"] == 0


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "strict"])
def test_relaxation_changes_the_text(v1: dict, name: str) -> None:
    assert v1[name]["relaxed"] > 0
    assert v1[name]["tokens"] != v1["strict"]["tokens"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_each_row_of_a_mixed_batch_is_its_own_run(runner: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(runner)
    names = list(OPTIONS)[:3]
    for at, tokens in enumerate(results["mixed"]["tokens"]):
        assert tokens == results[names[at % 3]]["tokens"][at // 3]


def test_both_runners_emit_the_same_tokens(v1: dict, v2: dict) -> None:
    for name, case in v2.items():
        longer = v1[name]["tokens"]
        assert case["tokens"] == [tokens[: len(own)] for tokens, own in zip(longer, case["tokens"], strict=True)]


def test_every_token_is_the_argmax_or_a_runner_up_inside_the_margin(
    v1: dict, v2: dict, prompts: list[list[int]]
) -> None:
    logits_of = _transformers()
    for runner in (v1, v2):
        for name, options in OPTIONS.items():
            if name not in runner:
                continue
            rule = MarsRequest.parse(options, MarsRequest(theta=DEFAULT_THETA))
            relaxed = 0
            for prompt, tokens in zip(prompts, runner[name]["tokens"], strict=True):
                for row, token in logits_of(prompt, tokens):
                    relaxed += _relaxed(row, token, rule)
            # The worker also counts what max_tokens then cuts, and V2 hasn't seen the last step yet.
            counted = runner[name]["relaxed"]
            slack = DRAFTS * len(prompts)
            assert relaxed - slack <= counted <= relaxed + slack
            assert (counted == 0) == (relaxed == 0)


def _relaxed(row: torch.Tensor, token: int, rule: MarsRequest) -> bool:
    """Whether the token isn't the argmax; then it has to be a runner-up inside the margin."""
    top = row.topk(3)
    z1, z2 = top.values[0], top.values[1]
    if row[token] >= z1 - NOISE:
        return False
    assert row[token] >= z2 - NOISE, "neither the argmax nor the runner-up"
    ratio, gap = rule.thresholds
    low = z2 > ratio * z1 - NOISE if rule.margin == "logit-ratio" else z1 - z2 < gap + NOISE
    assert z1 > 0
    assert low, f"runner-up outside the margin: {z1:.4f} {z2:.4f}"
    return True


def _transformers() -> Iterator:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_target_path(), dtype=torch.float32)

    @torch.inference_mode()
    def logits_of(prompt: list[int], tokens: list[int]) -> Iterator[tuple[torch.Tensor, int]]:
        rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return zip(rows, tokens, strict=True)

    return logits_of
