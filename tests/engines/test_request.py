"""What a request may say about MARS, and what it is told when that can't be used."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from eagle_mars.config import SamplingConfig
from eagle_mars.engines.request import MarsRequest
from eagle_mars.errors import ConfigError
from eagle_mars.verify.plan import plan

STRICT = MarsRequest()
RATIO = MarsRequest(theta=0.9, max_relaxed=4)
GAP = MarsRequest(margin="logit-gap", gap=1.5)


def test_without_a_word_the_default_holds() -> None:
    assert MarsRequest.parse(None, RATIO) is RATIO
    assert MarsRequest.parse({"somebody_elses": 3}, RATIO) is RATIO


@pytest.mark.parametrize(
    ("args", "default", "expected"),
    [
        ({"mars_theta": 0.8}, STRICT, MarsRequest(theta=0.8)),
        ({"mars_theta": 0.8}, RATIO, MarsRequest(theta=0.8, max_relaxed=4)),
        ({"mars_theta": 0.8}, GAP, MarsRequest(theta=0.8)),
        ({"mars_gap": 2}, RATIO, MarsRequest(margin="logit-gap", gap=2, max_relaxed=4)),
        ({"mars_gap": 2, "mars_margin": "logit-gap"}, STRICT, MarsRequest(margin="logit-gap", gap=2)),
        ({"mars_margin": "logit-ratio"}, RATIO, RATIO),
        ({"mars_margin": "logit-ratio"}, GAP, STRICT),
        ({"mars_max_relaxed": 2}, GAP, MarsRequest(margin="logit-gap", gap=1.5, max_relaxed=2)),
        ({"mars_max_relaxed": None}, RATIO, MarsRequest(theta=0.9)),
    ],
)
def test_a_request_is_laid_over_the_default(args: dict[str, Any], default: MarsRequest, expected: MarsRequest) -> None:
    assert MarsRequest.parse(args, default) == expected


@pytest.mark.parametrize("default", [STRICT, RATIO, GAP])
@pytest.mark.parametrize(
    "args", [{"mars_theta": 1.0}, {"mars_theta": 1}, {"mars_theta": None}, {"mars_gap": 0}, {"mars_max_relaxed": 0}]
)
def test_every_default_can_be_switched_off(args: dict[str, Any], default: MarsRequest) -> None:
    assert MarsRequest.parse(args, default).strict


@pytest.mark.parametrize("limit", [2**63, 10**30])
def test_a_limit_of_any_size_can_be_compiled(limit: int) -> None:
    """Admitted is admitted: nothing may raise in an engine's worker later."""
    request = MarsRequest.parse({"mars_theta": 0.9, "mars_max_relaxed": limit}, STRICT)
    compiled = plan(request.verify_config(()), SamplingConfig(), vocab_size=8, batch=1)
    assert compiled.max_relaxed.tolist() == [2**63 - 1]


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(ConfigError, match="mars_theta=") as caught:
        MarsRequest.parse({"mars_theta": "9" * 5000}, STRICT)
    assert len(str(caught.value)) < 250


def test_strict_is_what_cannot_relax() -> None:
    assert STRICT.strict
    assert STRICT.thresholds == (inf, 0.0)
    assert not RATIO.strict
    assert RATIO.thresholds == (0.9, 0.0)
    assert not GAP.strict
    assert GAP.thresholds == (inf, 1.5)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"mars_theta": 7}, r"mars_theta=7 is not usable"),
        ({"mars_theta": 0}, r"mars_theta=0 is not usable"),
        ({"mars_theta": "high"}, r"mars_theta='high' is not usable"),
        ({"mars_theta": float("nan")}, r"mars_theta=nan is not usable"),
        ({"mars_theta": True}, r"mars_theta=True is not usable"),
        ({"mars_gap": -1}, r"mars_gap=-1 is not usable"),
        ({"mars_gap": inf}, r"mars_gap=inf is not usable"),
        ({"mars_max_relaxed": 1.5}, r"mars_max_relaxed=1.5 is not usable"),
        ({"mars_max_relaxed": [1]}, r"mars_max_relaxed=\[1\] is not usable"),
        ({"mars_margin": "ratio"}, r"mars_margin='ratio' is not usable"),
        ({"mars_margin": "logit-gap"}, r"needs a gap in nats"),
        ({"mars_theta": 0.9, "mars_gap": 1}, r"leave gap out"),
        ({"mars_theta": 0.9, "mars_margin": "logit-gap", "mars_gap": 1}, r"leave theta out"),
        ({"mars_thetta": 0.9}, r"'mars_thetta' is no MARS option; correct its name to one of mars_theta, "),
    ],
)
@pytest.mark.parametrize("default", [STRICT, RATIO])
def test_a_mistake_is_one_sentence(args: dict[str, Any], words: str, default: MarsRequest) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        MarsRequest.parse(args, default)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_the_servers_default() -> None:
    assert MarsRequest.default_from({}) == STRICT
    assert MarsRequest.default_from({"gap": 1.5}) == GAP
    assert MarsRequest.default_from_environment({}) is None
    assert MarsRequest.default_from_environment({"EAGLE_MARS": "{}"}) == STRICT
    assert MarsRequest.default_from_environment({"EAGLE_MARS": '{"theta": 0.9, "max_relaxed": 4}'}) == RATIO


@pytest.mark.parametrize("text", ["0.9", "theta=0.9", "[]", '{"theta": 7}', '{"mars_theta": 0.9}'])
def test_an_unusable_default_names_what_is_wrong(text: str) -> None:
    with pytest.raises(ConfigError, match=r"EAGLE_MARS|theta"):
        MarsRequest.default_from_environment({"EAGLE_MARS": text})
