"""vLLM's plugin fails closed: whatever it doesn't know is refused at start or at admission, in one sentence."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_mars.errors import ConfigError, EngineError
from tests.engines import fake_vllm
from tests.engines.fake_vllm import SamplingParams, config

ON = {"theta": 0.9}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_MARS", raising=False)
    fake_vllm.install(monkeypatch)


def plugin(name: str) -> Any:
    return importlib.import_module(f"eagle_mars.engines.{name}")


def front(settings: SimpleNamespace) -> type:
    """An engine's front comes up with these settings; returns the class that judges its requests."""
    plugin("vllm_v1").register()
    sys.modules["vllm.v1.engine.input_processor"].InputProcessor(settings)
    return plugin("vllm_v2").MarsLogitsProcessor


def test_nothing_of_an_engine_is_imported_before_it_calls() -> None:
    modules = "common, eagle_mars.engines.vllm_rows, eagle_mars.engines.vllm_counts, eagle_mars.engines.vllm_v1"
    code = f"import sys, eagle_mars.engines.vllm_{modules}; print([m for m in sys.modules if m.startswith('vllm')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cu130", "0.33.0"])
def test_known_versions_start(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    front(config(ON))


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.3.2", "1.0"])
def test_unknown_versions_are_named_and_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    with pytest.raises(EngineError, match=r"knows vLLM 0\.32 or 0\.33, and this is " + version.replace(".", r"\.")):
        front(config(ON))
    front(config(None))  # an engine that doesn't ask for MARS is none of our business


@pytest.mark.parametrize("method", ["synthetic", "block", "fly"])
def test_other_verification_methods_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=f"'standard', not '{method}'"):
        front(config(ON, method))


def test_readers_of_rewritten_rows_are_refused() -> None:
    adaptive = SimpleNamespace(rejection_sample_method="standard", enable_adaptive_verification=True)
    watermarked = config(ON)
    watermarked.watermark_config = object()
    for settings in (
        config(ON, adaptive),
        watermarked,
        config(ON, return_sampling_mask=True),
        config(ON, logprobs_mode="processed_logits"),
    ):
        with pytest.raises(ConfigError, match=r"switch .* off, or MARS"):
            front(settings)


@pytest.mark.parametrize("default", [{"theta": 1.5}, {"tehta": 0.9}, True, 0.9, {"theta": 0.9, "gap": 1.0}])
def test_an_unusable_default_is_refused(default: Any) -> None:
    with pytest.raises(ConfigError):
        front(config(default))


def test_the_environment_is_a_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_MARS", '{"theta": 0.8}')
    assert plugin("vllm_common").active_default(config()).theta == 0.8
    assert plugin("vllm_common").active_default(config(ON)).theta == 0.9


def test_without_speculation_or_without_the_option_the_plugin_is_inert() -> None:
    for settings in (config(ON, None), config(None)):
        assert plugin("vllm_common").active_default(settings) is None
        processor = plugin("vllm_v2").MarsLogitsProcessor(settings, "cpu", False)
        logits = object()
        assert processor.apply(logits) is logits
        assert processor.is_argmax_invariant()
        assert not processor.add_request(0, SamplingParams())


@pytest.mark.parametrize("missing", ["vllm.v1.engine.input_processor", "vllm.v1.worker.worker_base"])
def test_a_vllm_without_the_hooks_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    fake_vllm.install(monkeypatch, without=(missing,))
    with pytest.raises(EngineError, match=r"install vLLM 0\.32 or 0\.33"):
        plugin("vllm_v1").register()


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize_from_config(self: Any, configs: list, extra: int) -> None: ...

    wrapper = sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase
    monkeypatch.setattr(wrapper, "initialize_from_config", initialize_from_config)
    with pytest.raises(EngineError, match=r"WorkerWrapperBase\.initialize_from_config is not the one of vLLM"):
        plugin("vllm_v1").register()


def test_a_changed_rejection_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attach = plugin("vllm_v1").attach
    default = plugin("vllm_common").active_default(config(ON))
    with pytest.raises(EngineError, match="can't be put before NoneType"):
        attach(SimpleNamespace(rejection_sampler=None), config(ON), default)

    def apply_logits_processors(self: Any, logits: Any, metadata: Any) -> None: ...

    runner = fake_vllm.V1Runner({})
    monkeypatch.setattr(fake_vllm.RejectionSampler, "apply_logits_processors", apply_logits_processors)
    with pytest.raises(EngineError, match="apply_logits_processors is not the one of vLLM"):
        attach(runner, config(ON), default)
    assert type(runner.rejection_sampler) is fake_vllm.RejectionSampler


def test_a_v2_runner_with_other_samplers_or_without_the_processor_is_refused() -> None:
    of = plugin("vllm_v2").MarsLogitsProcessor.of
    known = fake_vllm.V2RejectionSampler()
    with pytest.raises(EngineError, match="can't be put before SimpleNamespace"):
        of(SimpleNamespace(sampler=SimpleNamespace(), rejection_sampler=known))
    with pytest.raises(EngineError, match="holds 0 MARS processors"):
        of(SimpleNamespace(sampler=fake_vllm.V2Sampler([]), rejection_sampler=known))


def test_without_a_tokenizer_nothing_can_be_protected() -> None:
    with pytest.raises(ConfigError, match="skip-tokenizer-init"):
        plugin("vllm_common").protected_mask(config(ON, tokenizer=None), 12, "cpu")


def test_special_added_and_ending_tokens_are_protected() -> None:
    mask = plugin("vllm_common").protected_mask(config(ON), 11, "cpu")
    assert mask.nonzero().flatten().tolist() == [9, 10]


@pytest.mark.parametrize(
    "options", [{"mars_theta": 7}, {"mars_theta": "low"}, {"mars_tehta": 0.9}, {"mars_theta": 0.9, "mars_gap": 1.0}]
)
def test_bad_options_are_refused_at_admission(options: dict) -> None:
    admission = front(config(ON))
    with pytest.raises(ValueError, match=r"mars_|MARS"):  # vLLM makes a 400 of a ValueError
        admission.validate_params(SamplingParams(extra_args=options))
    admission.validate_params(SamplingParams(extra_args={"somebody_elses": 7}))


def test_a_constrained_request_is_strict_by_default_and_may_not_ask_for_more() -> None:
    admission = front(config(ON))
    row_rule, default = plugin("vllm_rows").row_rule, plugin("vllm_common").active_default(config(ON))
    for constrained in (
        {"structured_outputs": object()},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["no"]},
        {"thinking_token_budget": 0},
    ):
        admission.validate_params(SamplingParams(**constrained))
        assert row_rule(SamplingParams(**constrained), default) is plugin("vllm_rows").STRICT
        admission.validate_params(SamplingParams(**constrained, extra_args={"mars_theta": 1.0}))
        with pytest.raises(ConfigError, match=f"{next(iter(constrained))} rules out"):
            admission.validate_params(SamplingParams(**constrained, extra_args={"mars_theta": 0.9}))


def test_options_for_a_server_without_mars_are_refused() -> None:
    asked = SamplingParams(extra_args={"mars_theta": 0.9})
    for settings in (config(None), config(ON, None)):
        admission = front(settings)
        admission.validate_params(SamplingParams())
        with pytest.raises(ConfigError, match="MARS is off on this server"):
            admission.validate_params(asked)


def test_options_are_refused_where_the_general_plugin_was_left_out() -> None:
    admission = plugin("vllm_v2").MarsLogitsProcessor
    admission.validate_params(SamplingParams())
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        admission.validate_params(SamplingParams(extra_args={"mars_theta": 0.9}))
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        admission(config(ON, v2=True), SimpleNamespace())


def test_plugins_may_be_loaded_twice() -> None:
    register = plugin("vllm_v1").register
    register()
    first = sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase.initialize_from_config
    register()
    assert sys.modules["vllm.v1.worker.worker_base"].WorkerWrapperBase.initialize_from_config is first
