"""`custom_generate` inside `generate` of stock models: its outputs, its options, and what it refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, TextIteratorStreamer
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

import eagle_mars
from eagle_mars import DraftConfig, SamplingConfig, VerifyConfig, hf_generate
from eagle_mars.engine import Request
from eagle_mars.errors import CheckpointError, ConfigError, ContextLengthError
from tests.tiny import FAMILIES, VOCAB, tiny_head, tiny_model
from tests.tiny_pair import save_head, save_tokenizer

TREE = DraftConfig(total_token=16, depth=3, top_k=6)
EXACT = {
    "custom_generate": eagle_mars.custom_generate,
    "verify": VerifyConfig(rule="exact"),
    "tree": TREE,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("Llama")


@pytest.fixture(scope="module")
def options(llama: PreTrainedModel) -> dict:
    return {**EXACT, "draft": tiny_head(llama)}


def prompt(seed: int = 0, length: int = 9) -> torch.Tensor:
    return torch.randint(2, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_greedy_is_stock_greedy(family: str) -> None:
    model = tiny_model(family)
    head = tiny_head(model)
    accepted = 0
    for seed in range(2):
        ids = prompt(seed)
        stock = model.generate(ids, max_new_tokens=20, do_sample=False)
        ours = model.generate(
            ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, **EXACT, draft=head
        )
        assert torch.equal(ours.sequences, stock)
        assert not model._forward_hooks
        accepted += sum(ours.accepted_lengths)
    assert accepted > 0  # else the trees were never right, and nothing was tested


@pytest.mark.parametrize(
    "length",
    [{"max_new_tokens": 1}, {"max_length": 20}, {"max_new_tokens": 8, "eos_token_id": [5, 77]}, {}],
    ids=str,
)
def test_lengths_and_eos_ids(llama: PreTrainedModel, options: dict, length: dict) -> None:
    if "eos_token_id" in length:  # ids that do occur
        free = llama.generate(prompt(), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 9:].tolist()
        length = {**length, "eos_token_id": [free[4], VOCAB - 1]}
    stock = llama.generate(prompt(), do_sample=False, pad_token_id=0, **length)
    assert torch.equal(llama.generate(prompt(), do_sample=False, **options, **length), stock)


def test_the_penalty_of_the_generation_config_is_applied(llama: PreTrainedModel, options: dict) -> None:
    greedy = {"do_sample": False, "max_new_tokens": 20, "repetition_penalty": 1.7}
    stock = llama.generate(prompt(), pad_token_id=0, **greedy)
    assert torch.equal(llama.generate(prompt(), **options, **greedy), stock)
    assert not torch.equal(llama.generate(prompt(), **options, **{**greedy, "repetition_penalty": 1.0}), stock)


def test_sampling_options_reach_the_engine(llama: PreTrainedModel, options: dict) -> None:
    """Each truncation alone leaves one token, so sampling with it must be greedy; without any it isn't."""
    greedy = llama.generate(prompt(), max_new_tokens=10, do_sample=False, pad_token_id=0)
    free = {"do_sample": True, "max_new_tokens": 10, "top_k": 0}
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}):
        assert torch.equal(llama.generate(prompt(), **options, **{**free, **narrow}), greedy), narrow
    torch.manual_seed(3)
    first = llama.generate(prompt(), **options, **free)
    torch.manual_seed(3)
    assert torch.equal(llama.generate(prompt(), **options, **free), first)
    assert not torch.equal(first, greedy)


def test_sampling_options_keep_their_values(llama: PreTrainedModel, options: dict, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(hf_generate, "Request", lambda **fields: seen.append(fields["sampling"]) or Request(**fields))
    warped = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1}
    llama.generate(prompt(), max_new_tokens=1, do_sample=True, **warped, **options)
    assert seen == [SamplingConfig(**warped)]


def test_dict_output_says_how_the_tokens_came_about(llama: PreTrainedModel, options: dict) -> None:
    relaxed = {**options, "verify": VerifyConfig(margin="logit-gap", gap=9.0)}
    out = llama.generate(prompt(), max_new_tokens=24, do_sample=False, return_dict_in_generate=True, **relaxed)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert len(out.provenance) == out.sequences.shape[1] - 9 == 24
    assert "relaxed" in out.provenance
    assert out.regret > 0
    assert out.guarantee.startswith("Lossy")


class EndsWith(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token
        self.lengths: list[int] = []

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_stopping_criteria_are_asked_after_every_token(llama: PreTrainedModel, options: dict) -> None:
    free = llama.generate(prompt(), max_new_tokens=20, do_sample=False)[0, 9:].tolist()
    watcher = EndsWith(free[10])
    greedy = {"do_sample": False, "max_new_tokens": 20}
    ours = llama.generate(prompt(), stopping_criteria=StoppingCriteriaList([watcher]), **options, **greedy)
    end = free.index(free[10]) + 1
    assert ours[0, 9:].tolist() == free[:end]
    assert watcher.lengths == list(range(10, 10 + end))
    now = StoppingCriteriaList([MaxTimeCriteria(max_time=0.0)])
    assert llama.generate(prompt(), stopping_criteria=now, **options, **greedy).shape == (1, 10)


def test_a_streamer_gets_what_stock_gives_it(llama: PreTrainedModel, options: dict) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls: list = []

        def put(self, value: torch.Tensor) -> None:
            self.calls.append(value.tolist())

        def end(self) -> None:
            self.calls.append("end")

    stock, ours = Recorder(), Recorder()
    llama.generate(prompt(), max_new_tokens=12, do_sample=False, streamer=stock)
    llama.generate(prompt(), max_new_tokens=12, do_sample=False, streamer=ours, **options)
    assert ours.calls == stock.calls


def test_a_text_streamer_in_a_thread(tmp_path: Path) -> None:
    model = tiny_model("Llama", vocab_size=save_tokenizer(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    ids = tokenizer("hello", return_tensors="pt").input_ids
    options = {"max_new_tokens": 12, "do_sample": False, "draft": tiny_head(model), **EXACT}
    thread = threading.Thread(target=model.generate, args=(ids,), kwargs={"streamer": streamer, **options})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(model.generate(ids, **options)[0, ids.shape[1] :])


def test_a_head_named_by_its_directory_is_loaded_once(llama: PreTrainedModel, tmp_path: Path) -> None:
    save_head(tmp_path / "head", llama)
    stock = llama.generate(prompt(), max_new_tokens=12, do_sample=False)
    named = {**EXACT, "draft": tmp_path / "head", "do_sample": False, "max_new_tokens": 12}
    assert torch.equal(llama.generate(prompt(), **named), stock)
    (tmp_path / "head" / "model.safetensors").unlink()
    assert torch.equal(llama.generate(prompt(), **named), stock)
    with pytest.raises(CheckpointError):
        llama.generate(prompt(), **{**named, "draft": tmp_path / "none"})


def test_a_smaller_model_drafts(llama: PreTrainedModel) -> None:
    drafter = tiny_model("Qwen2", seed=1, num_hidden_layers=2)
    greedy = {"max_new_tokens": 12, "do_sample": False}
    stock = llama.generate(prompt(), **greedy)
    assert torch.equal(llama.generate(prompt(), **EXACT, **greedy, draft=drafter), stock)
    chain = {**EXACT, "tree": DraftConfig.chain(4), "return_dict_in_generate": True}
    itself = llama.generate(prompt(), **chain, **greedy, draft=llama)
    assert all(parameter.requires_grad for parameter in llama.parameters())  # the caller's models stay as they are
    assert torch.equal(itself.sequences, stock)
    assert min(itself.accepted_lengths) == 4  # a target that drafts for itself is always right


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"draft": None}, "needs a draft head"),
        ({"num_beams": 2}, "not by beam search"),
        ({"num_return_sequences": 2, "do_sample": True}, "one sequence per call, not 2"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"min_new_tokens": 3, "eos_token_id": 4}, "MinLengthLogitsProcessor"),
        ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
        ({"attention_mask": torch.tensor([[0] + [1] * 8])}, "without padding"),
        ({"position_ids": torch.arange(1, 10).unsqueeze(0)}, "position_ids"),
        ({"max_new_tokens": 4000}, "context"),
        (
            {
                "do_sample": True,
                "top_k": 0,
                "logits_processor": LogitsProcessorList([TopPLogitsWarper(0.5), TemperatureLogitsWarper(0.5)]),
            },
            "in this order",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_it_cant_honour_is_refused_in_one_sentence(
    llama: PreTrainedModel, options: dict, change: dict, sentence: str
) -> None:
    with pytest.raises((ConfigError, ContextLengthError), match=sentence):
        llama.generate(prompt(), **{"max_new_tokens": 5, "do_sample": False, **options, **change})


def test_other_refusals(llama: PreTrainedModel, options: dict) -> None:
    with pytest.raises(ConfigError, match="one sequence per call, not 2"):
        llama.generate(prompt().repeat(2, 1), max_new_tokens=5, **options)
    with pytest.raises(ConfigError, match="bound to another model"):
        tiny_model("Llama", seed=1).generate(prompt(), max_new_tokens=5, **options)
    with pytest.raises(ConfigError, match="assistant_model isn't used"):
        llama.generate(prompt(), max_new_tokens=5, assistant_model=tiny_model("Llama", seed=1), **options)
    output = llama(prompt(), use_cache=True)
    name = "cache" if "cache" in output else "past_key_values"  # the older name, in transformers 5.10
    with pytest.raises(ConfigError, match="filled cache"):
        llama.generate(torch.cat((prompt(), prompt()), dim=1), max_new_tokens=5, **{name: output[name]}, **options)
    llama.train()
    try:
        with pytest.raises(ConfigError, match="training mode"):
            llama.generate(prompt(), max_new_tokens=5, **options)
    finally:
        llama.eval()
