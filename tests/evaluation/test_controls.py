"""The controls are plain autoregression when nothing fires, and disturb what, where and as often as they say."""

from __future__ import annotations

import pytest
import torch

from eagle_mars import EaModel, SamplingConfig, VerifyConfig
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.target import TargetModel
from evaluation.controls import Control, control_steps, generate
from tests.evaluation.rows import answer, turn
from tests.tiny import tiny_model

WIDE = VerifyConfig(margin="logit-gap", gap=1e6, protected_ids=())  # every position has a low margin
PROMPT = torch.tensor([[5, 17, 40, 3]])
TOKENS = 30


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("Llama", vocab_size=64))


def run(target: TargetModel, control: Control, temperature: float = 0.0, tokens: int = TOKENS, **request):
    sampling = SamplingConfig(temperature=temperature, seed=7)
    return list(control_steps(target, PROMPT, Request(max_new_tokens=tokens, sampling=sampling, **request), control))


def ids(steps) -> list[int]:
    return [token for step in steps for token in step.tokens]


def rows(target: TargetModel, tokens: list[int]) -> torch.Tensor:
    """Logits that each of the tokens was chosen from."""
    with torch.no_grad():
        return target.model(torch.cat((PROMPT, torch.tensor([tokens])), dim=1)).logits[0, PROMPT.shape[1] - 1 : -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["random-swap", "matched"])
def test_at_rate_zero_it_is_the_target_alone(target: TargetModel, kind, temperature: float) -> None:
    steps = run(target, Control(kind=kind, verify=WIDE, rate=0), temperature, tokens=40)
    request = Request(max_new_tokens=40, sampling=SamplingConfig(temperature=temperature, seed=7))
    alone = list(Engine(target).autoregress(PROMPT, request))
    assert ids(steps) == ids(alone)
    assert [step.finish_reason for step in steps] == [step.finish_reason for step in alone]
    assert {step.provenance for step in steps} == {("target",)}


def test_at_rate_one_every_token_is_the_runner_up(target: TargetModel) -> None:
    steps = run(target, Control(kind="random-swap", verify=WIDE, rate=1), tokens=40)
    best = rows(target, ids(steps)).topk(2)
    assert ids(steps) == best.indices[:, 1].tolist()
    assert {step.provenance for step in steps} == {("relaxed",)}
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    assert [step.regret for step in steps] == pytest.approx(gaps, abs=1e-3)  # fp32, another forward


def test_swaps_come_at_the_rate_and_only_where_the_margin_is_low(target: TargetModel) -> None:
    narrow = VerifyConfig(margin="logit-gap", gap=1.0, protected_ids=())
    steps = run(target, Control(kind="random-swap", verify=narrow, rate=0.5), tokens=250)
    best = rows(target, ids(steps)).topk(2)
    low = (best.values[:, 0] - best.values[:, 1] < 1.0).tolist()
    assert [bool(step.low_margin) for step in steps] == low
    swapped = [step.provenance == ("relaxed",) for step in steps]
    assert all(at_low for at_low, at_swap in zip(low, swapped, strict=True) if at_swap)
    assert sum(low) > 20
    # Four standard deviations of a fair coin.
    assert abs(sum(swapped) - sum(low) / 2) < 4 * (sum(low) / 4) ** 0.5


def test_matched_draws_the_runner_up_with_its_share(target: TargetModel) -> None:
    steps = run(target, Control(kind="matched", verify=WIDE, rate=1), tokens=250)
    best = rows(target, ids(steps)).topk(2)
    share = torch.sigmoid(best.values[:, 1] - best.values[:, 0]).double()
    second = torch.tensor([step.provenance == ("relaxed",) for step in steps])
    assert torch.equal(second, torch.tensor(ids(steps)) == best.indices[:, 1])
    deviation = float((share * (1 - share)).sum()) ** 0.5
    assert abs(float(second.double().sum() - share.sum())) < 4 * deviation


def test_protected_tokens_are_neither_emitted_nor_overridden(target: TargetModel) -> None:
    everything = tuple(range(64))
    control = Control(kind="random-swap", verify=VerifyConfig(margin="logit-gap", gap=1e6), rate=1)
    assert {step.provenance for step in run(target, control, tokens=20, special_ids=everything)} == {("target",)}
    half = run(target, control, tokens=60, special_ids=tuple(range(32)))
    assert {step.provenance for step in half} == {("target",), ("relaxed",)}
    assert all(token >= 32 for step in half if step.provenance == ("relaxed",) for token in step.tokens)


def test_a_stop_id_ends_it(target: TargetModel) -> None:
    control = Control(kind="random-swap", verify=WIDE, rate=1)
    third = ids(run(target, control))[2]
    steps = run(target, control, stop_ids=frozenset({third}))
    assert steps[-1].finish_reason == "stop"
    assert ids(steps)[-1] == third
    assert third not in ids(steps)[:-1]


def test_the_rate_comes_from_the_rules_answers() -> None:
    mars = VerifyConfig(theta=0.9)
    told = [answer(1, turn("terr", low_margin=5)), answer(2, turn("teee", low_margin=3))]
    assert Control.like("matched", mars, told).rate == 2 / 8
    assert Control.like("matched", mars, told).verify == mars
    with pytest.raises(ConfigError, match="no low margin"):
        Control.like("matched", mars, [answer(1, turn("tee"))])
    with pytest.raises(ConfigError, match="needs mars"):
        Control.like("matched", VerifyConfig(rule="typical"), told)


def test_a_result_like_any_other(tiny_pair) -> None:
    ea = EaModel.from_pretrained(*tiny_pair, total_token=8, depth=2, top_k=3)
    prompt = torch.tensor([ea.chat_ids("ab")])
    control = Control(kind="random-swap", verify=VerifyConfig(margin="logit-gap", gap=1e6), rate=1)
    result = generate(ea, prompt, control, max_new_tokens=8, sampling=SamplingConfig(seed=0))
    assert (result.new_tokens, result.cycles, result.rule) == (8, 0, "random-swap")
    assert result.relaxed == 8
    with pytest.raises(ConfigError, match="needs a seed"):
        generate(ea, prompt, control, max_new_tokens=8, sampling=SamplingConfig())
    with pytest.raises(ConfigError, match="no penalties"):
        generate(ea, prompt, control, max_new_tokens=8, sampling=SamplingConfig(seed=0, repetition_penalty=1.1))
