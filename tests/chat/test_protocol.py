"""Fields of a request become options; ceilings hold."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from eagle_mars.chat.limits import Limits
from eagle_mars.chat.protocol import ChatBody, CompletionBody
from eagle_mars.config import DraftConfig, VerifyConfig
from eagle_mars.errors import ConfigError

HELLO = [{"role": "user", "content": "hi"}]
MARS = VerifyConfig(theta=0.9)
GAP = VerifyConfig(margin="logit-gap", gap=1.0)
EXACT = VerifyConfig(rule="exact")


def chat(**fields) -> ChatBody:
    return ChatBody(messages=HELLO, **fields)


@pytest.mark.parametrize(
    ("default", "fields", "expected"),
    [
        (MARS, {}, MARS),
        (MARS, {"theta": 0.95}, VerifyConfig(theta=0.95)),
        (MARS, {"theta": None}, VerifyConfig(theta=None)),
        (MARS, {"rule": None, "margin": None, "max_regret": None}, MARS),
        (MARS, {"gap": 0.5}, VerifyConfig(margin="logit-gap", gap=0.5)),
        (GAP, {"theta": 0.8}, VerifyConfig(theta=0.8)),
        (GAP, {"rule": "exact"}, VerifyConfig(rule="exact", margin="logit-gap", gap=1.0)),
        (EXACT, {"theta": 0.8}, VerifyConfig(rule="mars", theta=0.8)),
        (EXACT, {"branch": "longest", "max_regret": 2.0}, VerifyConfig(rule="exact", branch="longest", max_regret=2)),
    ],
)
def test_naming_theta_or_gap_chooses_what_reads_it(default, fields, expected) -> None:
    config = chat(**fields).verify_config(default)
    assert config.model_dump(exclude={"theta"} if expected.margin == "logit-gap" else None) == expected.model_dump(
        exclude={"theta"} if expected.margin == "logit-gap" else None
    )
    assert config.relaxes == expected.relaxes


def test_two_measures_of_one_margin_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        chat(theta=0.9, gap=1.0).verify_config(MARS)
    with pytest.raises(ConfigError, match="logit-gap"):
        chat(margin="logit-gap").verify_config(MARS)


def test_choices_differ_by_their_seed(service) -> None:
    seeds = [options.sampling.seed for options in chat(n=3, seed=7).options(service, 1.0)]
    assert seeds == [7, 8, 9]
    assert [options.sampling.seed for options in chat(n=2).options(service, 1.0)] == [None, None]


def test_lengths_temperature_and_stops(service) -> None:
    (options,) = chat(max_tokens=5, max_completion_tokens=3, stop="x", temperature=0).options(service, 1.0)
    assert (options.max_new_tokens, options.stop, options.sampling.temperature) == (3, ("x",), 0)
    (options,) = chat(max_tokens=5, stop=["x", "y"], top_k=-1).options(service, 0.7)
    assert (options.max_new_tokens, options.stop, options.sampling.temperature) == (5, ("x", "y"), 0.7)
    assert options.sampling.top_k == 0


def test_scores_are_asked_for_only_when_something_shows_them(service) -> None:
    def asked(body) -> int | None:
        return body.options(service, 1.0)[0].top_logprobs

    assert asked(chat()) is None
    assert asked(chat(logprobs=True)) == 0
    assert asked(chat(logprobs=True, top_logprobs=5, details=True)) == 5
    assert asked(chat(details=True)) == 2
    assert asked(CompletionBody(prompt="a", logprobs=3)) == 3
    with pytest.raises(ConfigError, match="needs logprobs=true"):
        asked(chat(top_logprobs=2))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_forms_of_a_prompt(prompt, expected) -> None:
    assert CompletionBody(prompt=prompt).prompts() == expected


def test_prompts_times_choices_are_bounded() -> None:
    for body in (CompletionBody(prompt=[]), CompletionBody(prompt=["a"] * 5, n=4)):
        with pytest.raises(ConfigError, match="prompts times n"):
            body.prompts()


@pytest.mark.parametrize(
    "fields",
    [
        {"theta": 0},
        {"theta": "0.9"},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"n": 0},
        {"seed": -1},
        {"seed": 2**63},
        {"max_tokens": True},
        {"stop": ["\ud800"]},
        {"draft": {"nodes": 3}},
        {"rule": "strict"},
    ],
)
def test_bad_values_are_refused(fields) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


def test_unknown_fields_are_kept_aside() -> None:
    assert chat(thetta=0.9, user="me").unknown_fields() == ["thetta", "user"]


@pytest.mark.parametrize(
    ("limits", "verify", "allowed"),
    [
        (Limits(), MARS, True),
        (Limits(), VerifyConfig(rule="typical"), False),
        (Limits(max_theta_relaxation=0.1), MARS, True),
        (Limits(max_theta_relaxation=0.1), VerifyConfig(theta=0.89), False),
        (Limits(max_theta_relaxation=0.1), VerifyConfig(theta=None), True),
        (Limits(max_theta_relaxation=0.1), VerifyConfig(rule="exact", theta=0.5), True),
        (Limits(max_theta_relaxation=0.1), GAP, False),
        (Limits(max_gap=1.0), GAP, True),
        (Limits(max_gap=0.9), GAP, False),
        (Limits(max_gap=1.0), MARS, False),
        (Limits(max_theta_relaxation=0), MARS, False),
        (Limits(max_theta_relaxation=0), EXACT, True),
    ],
)
def test_ceilings(limits: Limits, verify: VerifyConfig, allowed: bool) -> None:
    if allowed:
        limits.check(verify, DraftConfig())
    else:
        with pytest.raises(ConfigError, match="use "):
            limits.check(verify, DraftConfig())


@pytest.mark.parametrize(
    "draft", [DraftConfig(total_token=300), DraftConfig(total_token=8, depth=50), DraftConfig(total_token=8, top_k=99)]
)
def test_trees_are_bounded(draft: DraftConfig) -> None:
    with pytest.raises(ConfigError, match="lower it"):
        Limits().check(EXACT, draft)
