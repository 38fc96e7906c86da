from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from eagle_mars import DraftConfig, EaModel, SamplingConfig, VerifyConfig
from eagle_mars import compiled as compiled_module
from eagle_mars.draft import compiled_drafter
from eagle_mars.engine import Engine, Request
from eagle_mars.errors import ConfigError
from eagle_mars.result import Step
from eagle_mars.target import TargetModel
from tests.tiny import tiny_head, tiny_model

DRAFT = DraftConfig(total_token=8, depth=2, top_k=3)


def steps(engine: Engine, request: Request, method: str = "speculate") -> list[Step]:
    return list(getattr(engine, method)(torch.arange(29).unsqueeze(0) % 16, request))


def engines(compiled: bool, eagle: int = 3) -> Engine:
    model = tiny_model("Llama", vocab_size=16)
    head = tiny_head(model, eagle=eagle)
    return Engine(TargetModel(model, head.capture_layers, compiled=compiled), head)


def same(ours: list[Step], theirs: list[Step]) -> bool:
    first, second = ([(s.tokens, s.accepted, s.provenance) for s in steps] for steps in (ours, theirs))
    return first == second


REQUESTS = {
    "exact": Request(300, DRAFT, VerifyConfig(rule="exact")),  # long enough for both caches to move
    "mars": Request(40, DRAFT, VerifyConfig()),
    "sampled": Request(40, DRAFT, VerifyConfig(rule="exact"), SamplingConfig(temperature=1, seed=5)),
}


def test_inductor_gives_the_same_answers(caplog: pytest.LogCaptureFixture) -> None:
    plain, fast = engines(False), engines(True)
    with caplog.at_level(logging.WARNING):
        for name, request in REQUESTS.items():
            assert same(steps(fast, request), steps(plain, request)), name
    assert not caplog.records
    assert not fast.target._with_features.failed


@pytest.mark.parametrize("eagle", [1, 3])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_function_that_is_compiled_gives_the_same_answers(
    name: str, eagle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, and with the rounded-up reads of a CUDA graph."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for module in (compiled_module, compiled_drafter, __import__("eagle_mars.target", fromlist=["target"])):
        monkeypatch.setattr(module, "read_rows", lambda needed, capacity, device: min(-(-needed // 64) * 64, capacity))
    plain, fast = engines(False, eagle), engines(True, eagle)
    assert same(steps(fast, REQUESTS[name]), steps(plain, REQUESTS[name]))
    assert same(steps(fast, REQUESTS[name], "autoregress"), steps(plain, REQUESTS[name], "autoregress"))


def test_what_cannot_be_compiled_runs_as_it_is_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(function: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("no C++ compiler\nwas found")

        return run

    monkeypatch.setattr(torch, "compile", refuse)
    plain, fast = engines(False), engines(True)
    with caplog.at_level(logging.WARNING):
        assert same(steps(fast, REQUESTS["exact"]), steps(plain, REQUESTS["exact"]))
    assert [record.getMessage() for record in caplog.records] == [
        "the target's forward can't be compiled and runs as it is: no C++ compiler",
        "drafting can't be compiled and runs as it is: no C++ compiler",
    ]


def test_nothing_stays_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    fast = engines(True)
    steps(fast, REQUESTS["mars"])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in fast.target.model.modules())
    assert not fast.target._taps


def test_trees_of_changing_size_are_refused() -> None:
    request = Request(8, DRAFT.replace(entropy_stop=0.5), VerifyConfig(rule="exact"))
    with pytest.raises(ConfigError, match="entropy_stop or compile"):
        steps(engines(True), request)


def test_eager_attention_is_refused(tiny_pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="sdpa"):
        EaModel.from_pretrained(*tiny_pair, compile=True, attn_implementation="eager")
