"""The SGLang plugin without SGLang: when it refuses to start, what it admits, what it changes and what it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_mars.engines import sglang, sglang_report
from eagle_mars.engines.request import MarsRequest
from eagle_mars.engines.sglang_admission import ADMITTED, admit, admitted, check_server
from eagle_mars.errors import ConfigError
from eagle_mars.verify import guarantee
from tests.engines.fake_sglang import FakeSGLang, HookType, SamplingParams, install_fake

TARGETS = list(sglang.PARAMETERS)
LOOSE = MarsRequest(theta=0.8)
STRICT = MarsRequest()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSGLang:
    monkeypatch.setenv("EAGLE_MARS", '{"theta": 0.8}')
    return install_fake(monkeypatch)


def refusal() -> str:
    with pytest.raises(SystemExit) as end:
        sglang.load()
    return str(end.value)


# --- start


def test_without_the_variable_the_plugin_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EAGLE_MARS", raising=False)
    fake = install_fake(monkeypatch, version="99.0")
    sglang.load()
    assert fake.hooks == []


def test_every_hook_is_registered(fake: FakeSGLang) -> None:
    sglang.load()
    assert [target for target, _, _ in fake.hooks] == TARGETS
    assert [kind for _, _, kind in fake.hooks] == [HookType.AFTER] * 2 + [HookType.AROUND] * 4


def test_an_unusable_default_ends_the_process(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_MARS", '{"theta": 7}')
    assert "theta=7 is not usable" in refusal()
    assert fake.hooks == []


def test_an_unknown_version_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_MARS", "{}")
    fake = install_fake(monkeypatch, version="0.5.24")
    message = refusal()
    assert "knows SGLang 0.5.23" in message
    assert "0.5.24" in message
    assert fake.hooks == []


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("change", ["gone", "other parameters", "no function"])
def test_a_changed_target_ends_the_process(
    fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch, target: str, change: str
) -> None:
    path, name = target.rsplit(".", 1)
    owner = fake.modules.get(path) or getattr(fake.modules[path.rsplit(".", 1)[0]], path.rsplit(".", 1)[1])
    if change == "gone":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, (lambda batch: None) if change == "other parameters" else 1)
    assert target in refusal()
    assert fake.hooks == []


def test_a_platform_without_the_tree_sampler_is_served(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tree_speculative_sampling_target_only"
    monkeypatch.setattr(fake.modules["sglang.srt.speculative.eagle_utils"], name, None)
    sglang.load()
    assert [target for target, _, _ in fake.hooks] == [target for target in TARGETS if not target.endswith(name)]


# --- server arguments


class Variable:
    def __init__(self, value: Any) -> None:
        self.get = lambda: value


def server(**changes: object) -> tuple[SimpleNamespace, SimpleNamespace]:
    settings = {
        "speculative_algorithm": "EAGLE3",
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
        "speculative_use_block_verification": False,
        "enable_watermark": False,
        "skip_tokenizer_init": False,
        "tokenizer_worker_num": 1,
        "smg_grpc_mode": False,
    }
    environment = {"SGLANG_RUST_SERVER": False, "SGLANG_SIMULATE_ACC_LEN": -1}
    for name, value in changes.items():
        (settings if name in settings else environment)[name] = value
    return SimpleNamespace(**settings), SimpleNamespace(**{name: Variable(x) for name, x in environment.items()})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.5),
        ("speculative_use_block_verification", True),
        ("enable_watermark", True),
        ("skip_tokenizer_init", True),
        ("tokenizer_worker_num", 2),
        ("smg_grpc_mode", True),
        ("SGLANG_RUST_SERVER", True),
        ("SGLANG_SIMULATE_ACC_LEN", 3.0),
    ],
)
def test_a_server_that_does_not_fit_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"MARS can't be combined with .*EAGLE_MARS\.$") as raised:
        check_server(*server(**{name: value}), LOOSE, "0.5.23")
    assert name.lower().replace("_", "-") in str(raised.value).lower().replace("_", "-")


@pytest.mark.parametrize("algorithm", ["DFLASH", "UNO", "DSPARK", "FROZEN_KV_MTP"])
def test_an_algorithm_with_a_verifier_of_its_own_is_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match=f"EAGLE3, STANDALONE, NGRAM, not {algorithm}"):
        check_server(*server(speculative_algorithm=algorithm), LOOSE, "0.5.23")


def test_the_plugin_says_that_it_is_on(caplog: pytest.LogCaptureFixture) -> None:
    check_server(*server(), LOOSE, "0.5.23")
    assert "is on in SGLang 0.5.23, before the verifier of eagle_sample" in caplog.text
    assert guarantee.guarantee(LOOSE.verify_config()) in caplog.text
    caplog.clear()
    check_server(*server(speculative_algorithm=None), LOOSE, "0.5.23")
    assert "doesn't speculate" in caplog.text


# --- admission


def test_the_default_travels_with_every_request(fake: FakeSGLang) -> None:
    sglang.load()
    params = SamplingParams()
    fake.hook("verify")(None, params, 100)
    assert admitted(params) == LOOSE


def test_other_parameters_are_kept() -> None:
    params = SamplingParams({"thinking_budget": 9, "mars_theta": 0.9})
    admit(params, STRICT)
    assert admitted(params) == MarsRequest(theta=0.9)
    assert params.custom_params["thinking_budget"] == 9


def test_admitting_twice_changes_nothing() -> None:
    params = SamplingParams({"mars_gap": 1.5, "mars_max_relaxed": 2})
    admit(params, LOOSE)
    first = dict(params.custom_params)
    admit(params, LOOSE)
    assert params.custom_params == first
    assert admitted(params) == MarsRequest(margin="logit-gap", gap=1.5, max_relaxed=2)


def test_a_control_request_is_strict_and_asks_to_be_counted() -> None:
    params = SamplingParams({"mars_theta": 1.0})
    admit(params, LOOSE)
    assert admitted(params).strict


def test_silence_under_a_strict_default_leaves_the_request_alone() -> None:
    params = SamplingParams()
    admit(params, STRICT)
    assert params.custom_params is None
    assert admitted(params) is None


@pytest.mark.parametrize("args", [{"mars_theta": 7}, {"mars_thetta": 0.9}, {"mars_margin": "logit-gap"}])
def test_a_bad_value_is_refused_at_admission(fake: FakeSGLang, args: dict[str, Any]) -> None:
    sglang.load()
    with pytest.raises(ValueError, match=r"mars_|gap"):  # SGLang answers a ValueError with 400
        fake.hook("verify")(None, SamplingParams(args), 100)


@pytest.mark.parametrize("unfit", ["json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "watermark"])
def test_constrained_requests_are_strict_or_refused(unfit: str) -> None:
    params = SamplingParams(**{unfit: {"7": 1.0}})
    admit(params, LOOSE)
    assert admitted(params) is None
    admit(SamplingParams({"mars_theta": 1.0}, **{unfit: {"7": 1.0}}), LOOSE)
    with pytest.raises(ConfigError, match=f"A request with {unfit} is never relaxed"):
        admit(SamplingParams({"mars_theta": 0.9}, **{unfit: {"7": 1.0}}), STRICT)


def test_forged_options_are_cleared_or_strict() -> None:
    params = SamplingParams({ADMITTED: {"theta": 0.5}})
    admit(params, STRICT)
    assert admitted(params) is None
    for forged in ({"theta": 7}, {"theta": [1]}, {"what": 1}):
        assert admitted(SamplingParams({ADMITTED: forged})).strict


# --- verification


class Tokenizer:
    all_special_ids = (5,)
    additional_stop_token_ids = None

    def get_added_vocab(self) -> dict[str, int]:
        return {"<think>": 6}


def request(args: dict[str, Any] | None = None, default: MarsRequest = STRICT, **changes: Any) -> SimpleNamespace:
    params = SamplingParams(args)
    admit(params, default)
    req = {"sampling_params": params, "grammar": None, "custom_logit_processor": None, "customized_info": None}
    return SimpleNamespace(**{**req, "tokenizer": Tokenizer(), "eos_token_ids": {7}, **changes})


def greedy_call(fake: FakeSGLang, requests: list[SimpleNamespace], row: list[float], draft: int) -> SimpleNamespace:
    """One `eagle_sample` over chains of two equal drafts, with SGLang's greedy verifier in plain Python."""
    sglang.load()
    batch = len(requests)
    logits = torch.tensor(row).repeat(batch * 3, 1)
    output = SimpleNamespace(next_token_logits=logits, auxiliary_device_output=None)
    links = torch.tensor([1, 2, -1]).repeat(batch, 1)
    asked: list[Tensor] = []

    def kernel(**named: Any) -> None:
        asked.append(named["target_predict"])
        for b, (tokens, wanted) in enumerate(zip(named["candidates"], named["target_predict"], strict=True)):
            path = [0]
            while path[-1] < 2 and tokens[path[-1] + 1] == wanted[path[-1]]:
                path.append(path[-1] + 1)
            named["accept_index"][b, : len(path)] = torch.tensor(path) + 3 * b

    def original(verify_input: Any, batch_: Any, logits_output: Any) -> tuple[None, None, Tensor]:
        accept_index = torch.full((batch, 3), -1, dtype=torch.int32)
        fake.hook("verify_tree_greedy_func")(
            kernel,
            accept_index=accept_index,
            candidates=torch.tensor([0, draft, draft]).repeat(batch, 1),
            retrieve_next_token=links,
            retrieve_next_sibling=torch.full_like(links, -1),
            target_predict=logits.argmax(-1).view(batch, 3),
        )
        return None, None, accept_index

    idle = SimpleNamespace(is_idle=lambda: False)
    step = SimpleNamespace(forward_mode=idle, reqs=requests, seq_lens=torch.zeros(batch))
    result = fake.hook("eagle_sample")(original, None, step, output)
    return SimpleNamespace(output=output, accept_index=result[2], target_predict=asked[0], step=step)


CLOSE = [0.0, 0.0, 9.0, 8.9, 0.0, 8.8, 0.0, 0.0]


def test_each_request_of_a_batch_is_relaxed_by_its_own_options(fake: FakeSGLang) -> None:
    requests = [request(), request({"mars_theta": 0.9}), request({"mars_theta": 1.0}), request(default=LOOSE)]
    requests.append(request({"mars_theta": 0.9, "mars_max_relaxed": 1}))
    call = greedy_call(fake, requests, CLOSE, draft=3)
    assert (call.accept_index >= 0).sum(-1).tolist() == [1, 3, 1, 3, 2]


@pytest.mark.parametrize(
    "changes",
    [{"grammar": object()}, {"custom_logit_processor": "x"}, {"tokenizer": None}, {"eos_token_ids": {3}}],
    ids=lambda changes: next(iter(changes)),  # an object's own text differs between test processes
)
def test_what_the_scheduler_alone_knows_makes_strict(fake: FakeSGLang, changes: dict[str, Any]) -> None:
    call = greedy_call(fake, [request({"mars_theta": 0.9}, **changes)], CLOSE, draft=3)
    assert (call.accept_index >= 0).sum().item() == 1
    assert torch.equal(call.target_predict, torch.full((1, 3), 2))


def test_protected_tokens_are_neither_accepted_nor_overridden(fake: FakeSGLang) -> None:
    for row, draft in (([0, 0, 9.0, 0, 0, 8.9, 0, 0], 5), ([0, 0, 8.9, 0, 0, 0, 9.0, 0], 2)):
        call = greedy_call(fake, [request({"mars_theta": 0.9})], row, draft)
        assert (call.accept_index >= 0).sum().item() == 1


def test_verifiers_outside_eagle_sample_are_left_alone(fake: FakeSGLang) -> None:
    sglang.load()
    for _, hook, kind in fake.hooks[3:]:
        assert kind is HookType.AROUND
        assert hook(lambda *args, **named: (args, named), 1, topk=2) == ((1,), {"topk": 2})


def test_a_step_does_not_outlive_its_call(fake: FakeSGLang) -> None:
    greedy_call(fake, [request({"mars_theta": 0.9})], CLOSE, draft=3)
    broken = SimpleNamespace(
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        reqs=[request({"mars_theta": 0.9})],
        seq_lens=torch.zeros(1),
    )
    logits = SimpleNamespace(next_token_logits=torch.tensor([CLOSE]), auxiliary_device_output=None)
    with pytest.raises(ZeroDivisionError):
        fake.hook("eagle_sample")(lambda *_: 1 / 0, None, broken, logits)
    assert fake.hook("verify_tree_greedy_func")(lambda **named: named, topk=2) == {"topk": 2}


# --- counting


def commit(start: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(output_index=start, token_ids=tuple(range(count)))


def test_an_answer_tells_which_of_its_tokens_were_relaxed(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(sglang_report, "_counter", lambda: SimpleNamespace(inc=counted.append))
    requests = [request({"mars_theta": 0.9}), request({"mars_theta": 1.0}), request(), request({"mars_theta": 0.9})]
    call = greedy_call(fake, requests, CLOSE, draft=3)
    host = call.output.auxiliary_device_output.copy_to_host(lambda tensor: tensor)
    host.consume(call.step, [commit(1, 3), commit(1, 1), commit(1, 1), commit(1, 2)])
    told = [(req.customized_info or {}).get("mars_relaxed") for req in requests]
    assert told == [[0, 1, 1, 0], [0, 0], None, [0, 1, 1]]  # the last one ended with its second new token
    assert counted == [4]
    host.consume(call.step, [commit(4, 3), None, None, None])
    assert requests[0].customized_info["mars_relaxed"] == [0, 1, 1, 0, 1, 1, 0]


def test_a_control_request_reports_zero(fake: FakeSGLang, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_report, "_counter", lambda: pytest.fail("nothing to count"))
    requests = [request({"mars_theta": 1.0})]
    call = greedy_call(fake, requests, CLOSE, draft=2)
    call.output.auxiliary_device_output.copy_to_host(pytest.fail).consume(call.step, [commit(1, 3)])
    assert requests[0].customized_info["mars_relaxed"] == [0, 0, 0, 0]


def test_under_pipeline_parallelism_nothing_is_attached(fake: FakeSGLang) -> None:
    fake.parallel.pp_size = 2
    call = greedy_call(fake, [request({"mars_theta": 0.9})], CLOSE, draft=3)
    assert (call.accept_index >= 0).sum().item() == 3
    assert call.output.auxiliary_device_output is None


def test_the_counter_is_named_as_documented() -> None:
    (family,) = sglang_report._counter().collect()
    assert f"{family.name}_total" == sglang_report.METRIC
