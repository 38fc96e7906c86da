"""What the plugin does with the rows of vLLM's two model runners; the rule itself is tested in test_rewrite.py."""

from __future__ import annotations

import importlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import REGISTRY

from tests.engines import fake_vllm
from tests.engines.fake_vllm import END, VOCABULARY, SamplingParams, config

DEFAULT = {"theta": 0.9}
# The target's two best tokens in every row; 9.5 / 10 is inside theta 0.9, 8.5 / 10 isn't.
BEST, SECOND = 3, 5


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)


def plugin(name: str) -> Any:
    return importlib.import_module(f"eagle_mars.engines.{name}")


def rows(count: int, second: float = 9.5) -> torch.Tensor:
    logits = torch.zeros(count, VOCABULARY)
    logits[:, BEST], logits[:, SECOND] = 10.0, second
    return logits


def relaxed_in_all() -> float:
    return REGISTRY.get_sample_value("eagle_mars_relaxed_tokens_total", {"model_name": "tiny"}) or 0.0


def v1(**requests: SamplingParams) -> fake_vllm.V1Runner:
    runner = fake_vllm.V1Runner({name: SimpleNamespace(sampling_params=params) for name, params in requests.items()})
    settings = config(DEFAULT)
    plugin("vllm_v1").attach(runner, settings, plugin("vllm_common").active_default(settings))
    return runner


def verify_v1(runner: fake_vllm.V1Runner, logits: torch.Tensor, *drafts: list[int]) -> list[list[int]]:
    """The tokens that each request gets, as the stock sampler hands them out."""
    flat = torch.tensor([token for chain in drafts for token in chain], dtype=torch.int32)
    metadata = SimpleNamespace(draft_token_ids=flat, num_draft_tokens=[len(chain) for chain in drafts])
    sampled = runner.rejection_sampler(metadata, None, logits, None).sampled_token_ids
    return [[token for token in row if token >= 0] for row in sampled.tolist()]


def test_v1_relaxes_each_request_by_its_own_options() -> None:
    strict = SamplingParams(extra_args={"mars_theta": 1.0})
    wider = SamplingParams(extra_args={"mars_theta": 0.8})
    runner = v1(
        strict=strict, default=SamplingParams(), wider=wider, capped=SamplingParams(extra_args={"mars_max_relaxed": 1})
    )
    chain = [SECOND, SECOND]
    assert verify_v1(runner, rows(8), chain, chain, chain, chain) == [[BEST], [*chain, 0], [*chain, 0], [SECOND, BEST]]
    assert verify_v1(runner, rows(8, 8.5), chain, chain, chain, chain) == [[BEST], [BEST], [*chain, 0], [BEST]]


def test_v1_counts_what_the_verifier_reached(caplog: pytest.LogCaptureFixture) -> None:
    runner = v1(one=SamplingParams(), two=SamplingParams(), strict=SamplingParams(extra_args={"mars_theta": 1.0}))
    before = relaxed_in_all()
    # The third draft of `one` is inside the margin too, but the second was rejected.
    verify_v1(runner, rows(6), [SECOND, 0, SECOND], [BEST, SECOND], [SECOND])
    assert relaxed_in_all() - before == 2
    caplog.set_level("INFO", "vllm.eagle_mars")
    for name in ("one", "strict"):
        del runner.requests[name]
    verify_v1(runner, rows(1), [SECOND])
    assert "Request one left: 1 relaxed tokens." in caplog.messages
    assert "Request strict left: 0 relaxed tokens." in caplog.messages
    assert relaxed_in_all() - before == 3


def test_v1_leaves_the_engines_warm_up_alone() -> None:
    for runner in (v1(), v1(waiting=SamplingParams())):  # its rows are nobody's
        assert verify_v1(runner, rows(2), [SECOND], [SECOND]) == [[BEST], [BEST]]


def test_v1_takes_a_request_that_admission_never_saw_as_strict() -> None:
    runner = v1(bad=SamplingParams(extra_args={"mars_theta": 7}))
    assert verify_v1(runner, rows(1), [SECOND]) == [[BEST]]


def test_v1_neither_accepts_nor_overrides_a_protected_token() -> None:
    logits = torch.zeros(2, VOCABULARY)
    logits[0, END], logits[0, SECOND] = 10.0, 9.5
    logits[1, BEST], logits[1, END] = 10.0, 9.5
    assert verify_v1(v1(a=SamplingParams(), b=SamplingParams()), logits, [SECOND], [END]) == [[END], [BEST]]


class V2:
    """A V2 runner with two drafts per request at most; total_len is what it has committed."""

    def __init__(self, slots: int = 4) -> None:
        self.total_len = SimpleNamespace(gpu=torch.zeros(slots, dtype=torch.int32))
        state = SimpleNamespace(device="cpu", max_num_reqs=slots, vocab_size=VOCABULARY, total_len=self.total_len)
        settings = config(DEFAULT, v2=True)
        plugin("vllm_v1").register()
        self.processor = plugin("vllm_v2").MarsLogitsProcessor(settings, state)
        names: dict[int, str] = defaultdict(str, {slot: f"r{slot}" for slot in range(slots)})
        self.live = {name: slot for slot, name in names.items()}
        states = SimpleNamespace(index_to_req_id=names, req_id_to_index=self.live)
        self.sampler = fake_vllm.V2Sampler([self.processor])
        self.rejection_sampler = fake_vllm.V2RejectionSampler()
        self.req_states, self.batch_sharder = states, None
        self.processor.of(self).attach(self, plugin("vllm_common").active_default(settings))

    def begin(self, slot: int, params: SamplingParams, length: int = 10) -> bool:
        changes = self.processor.add_request(slot, params)
        self.total_len.gpu[slot] = length  # vLLM stages it, and writes it when all requests have been added
        return changes

    def step(self, logits: torch.Tensor, chains: dict[int, list[int]], padding: int = 0) -> torch.Tensor:
        """Rewritten logits [R, V]; chains: slot -> its drafts."""
        self.processor.apply_staged_writes()
        owner, local, ids, pos = [], [], [], []
        for slot, drafts in chains.items():
            last = int(self.total_len.gpu[slot]) - 1
            for at, token in enumerate([SECOND, *drafts]):  # the request's newest token, then its drafts
                owner, local, ids, pos = [*owner, slot], [*local, at], [*ids, token], [*pos, last + at]
        tensors = {"expanded_idx_mapping": owner, "expanded_local_pos": local, "input_ids": ids, "pos": pos}
        fill = {"expanded_idx_mapping": -1}
        ctx = SimpleNamespace(
            idx_mapping=torch.tensor(list(chains), dtype=torch.int32),
            idx_mapping_np=np.array(list(chains)),
            **{k: torch.tensor(v + [fill.get(k, SECOND)] * padding, dtype=torch.int32) for k, v in tensors.items()},
        )
        return self.processor.apply(logits, ctx)


def test_v2_rewrites_the_rows_of_drafts_inside_the_margin() -> None:
    runner = V2()
    assert runner.begin(2, SamplingParams())
    assert not runner.begin(0, SamplingParams(extra_args={"mars_theta": 1.0}))
    best = runner.step(rows(6), {2: [SECOND, 0], 0: [SECOND, SECOND]}).argmax(-1)
    assert best.tolist() == [SECOND, BEST, BEST, BEST, BEST, BEST]


def test_v2_rewrites_a_sampled_row_to_its_draft_alone() -> None:
    runner = V2()
    runner.begin(0, SamplingParams(temperature=0.7))
    runner.begin(1, SamplingParams(temperature=0.7, top_k=1))  # the runner-up can't be drawn
    logits = runner.step(rows(4), {0: [SECOND], 1: [SECOND]})
    assert logits[0].isfinite().nonzero().tolist() == [[SECOND]]
    assert torch.equal(logits[1:], rows(3))


def test_v2_forgets_who_had_the_slot_before() -> None:
    runner = V2()
    for slot in (0, 1):
        runner.begin(slot, SamplingParams())
    assert runner.step(rows(4), {0: [SECOND], 1: [SECOND]}).argmax(-1).tolist() == [SECOND, BEST, SECOND, BEST]
    runner.begin(1, SamplingParams(extra_args={"mars_theta": 1.0}))
    assert runner.step(rows(4), {0: [SECOND], 1: [SECOND]}).argmax(-1).tolist() == [SECOND, BEST, BEST, BEST]


def test_v2_never_takes_the_next_requests_token_for_a_draft() -> None:
    runner = V2()
    for slot in (0, 1):
        runner.begin(slot, SamplingParams())
    logits = runner.step(rows(5), {0: [BEST, BEST], 1: [BEST]}, padding=0)
    assert torch.equal(logits, rows(5))


def test_v2_leaves_padding_and_steps_without_drafts_alone() -> None:
    runner = V2()
    runner.begin(3, SamplingParams())
    logits = runner.step(rows(4), {3: [BEST]}, padding=2)
    assert torch.equal(logits, rows(4))
    assert torch.equal(runner.step(rows(1), {3: []}), rows(1))


def test_v2_counts_once_the_step_is_committed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.eagle_mars")
    runner = V2()
    before = relaxed_in_all()
    runner.begin(0, SamplingParams())
    runner.begin(1, SamplingParams())
    runner.step(rows(6), {0: [SECOND, SECOND], 1: [0, SECOND]})
    runner.total_len.gpu += torch.tensor([3, 1, 0, 0], dtype=torch.int32)  # both drafts and one; none and one
    runner.step(rows(2), {0: [SECOND]}, padding=0)
    assert relaxed_in_all() - before == 2
    runner.total_len.gpu[0] += 2
    del runner.live["r0"]
    runner.begin(0, SamplingParams(), length=5)  # the slot is given away before the next step
    assert relaxed_in_all() - before == 3
    assert "Request r0 left: 3 relaxed tokens." in caplog.messages
