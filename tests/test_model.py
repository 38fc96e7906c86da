from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from eagle_mars import DraftConfig, EaModel, SamplingConfig, VerifyConfig
from eagle_mars.causal_lm import refuse_unfit
from eagle_mars.errors import CheckpointError, ConfigError, ContextLengthError, UnsupportedTargetError
from tests.tiny import tiny_model
from tests.tiny_pair import save_head, save_tokenizer

EXACT = VerifyConfig(rule="exact")


@pytest.fixture(scope="module")
def model(tiny_pair) -> EaModel:
    return EaModel.from_pretrained(*tiny_pair, total_token=12, depth=3, top_k=4)


# --- EAGLE's functions ---


def test_eagles_functions_return_eagles_forms(model: EaModel) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    plain = model.naivegenerate(ids, max_new_tokens=20)
    fast = model.eagenerate(ids, max_new_tokens=20, relaxation_threshold=None)
    assert torch.equal(plain, fast)
    assert fast.shape == (1, ids.shape[1] + 20)
    out, new_token, idx = model.eagenerate(ids, max_new_tokens=20, log=True, relaxation_threshold=None)
    assert torch.equal(out, fast)
    assert new_token == 20
    assert 0 < idx + 1 <= 19  # cycles; the first token comes from prefill
    steps = list(model.ea_generate(ids, max_new_tokens=20, relaxation_threshold=None))
    assert torch.equal(steps[-1], fast)
    assert all(torch.equal(b[:, : a.shape[1]], a) for a, b in pairwise(steps))
    assert torch.equal(list(model.naive_generate(ids, max_new_tokens=20))[-1], plain)


def test_torch_manual_seed_governs_eagles_functions(model: EaModel) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids

    def sample(**options) -> list[int]:
        return model.eagenerate(ids, temperature=1.0, top_p=0.9, top_k=20, max_new_tokens=16, **options).tolist()

    torch.manual_seed(1)
    first = sample()
    torch.manual_seed(1)
    assert sample() == first
    assert sample(seed=4) == sample(seed=4) != sample(seed=5)


def test_max_length_bounds_prompt_and_answer(model: EaModel) -> None:
    ids = torch.randint(5, 200, (1, 30))
    assert model.eagenerate(ids, max_new_tokens=50, max_length=40).shape[1] == 40
    with pytest.raises(ContextLengthError, match="max_length=30"):
        model.eagenerate(ids, max_length=30)


def test_llama3_flag_stops_at_eot(model: EaModel, monkeypatch) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    free = model.naivegenerate(ids, max_new_tokens=20)[0, ids.shape[1] :].tolist()
    stop = free[7]
    monkeypatch.setattr(model.tokenizer, "convert_tokens_to_ids", {"<|eot_id|>": stop}.__getitem__)
    cut = model.naivegenerate(ids, max_new_tokens=20, is_llama3=True)[0, ids.shape[1] :].tolist()
    assert cut == free[: free.index(stop) + 1]


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"temperature": 1.0, "top_k": 1.0}])
def test_eagles_near_greedy_options_are_greedy(model: EaModel, options: dict) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    greedy = model.naivegenerate(ids, max_new_tokens=16)
    assert torch.equal(model.eagenerate(ids, max_new_tokens=16, relaxation_threshold=None, **options), greedy)


def test_a_short_call_leaves_nothing_behind_for_a_long_one(model: EaModel) -> None:
    """The released code sizes its cache by the first call (EAGLE_SPEC 8.1, D3)."""
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    long = model.eagenerate(ids, max_new_tokens=60, max_length=300)
    model.eagenerate(ids, max_new_tokens=4, max_length=10)
    assert torch.equal(model.eagenerate(ids, max_new_tokens=60, max_length=300), long)


def test_dtype_is_the_checkpoints_unless_given(tmp_path: Path, tiny_pair) -> None:
    vocab = save_tokenizer(tmp_path)
    tiny_model("Llama", vocab_size=vocab).to(torch.bfloat16).save_pretrained(tmp_path)
    head = str(tiny_pair[1])
    for options, dtype in [
        ({}, torch.bfloat16),
        ({"dtype": torch.float32}, torch.float32),
        ({"torch_dtype": torch.float16, "low_cpu_mem_usage": True}, torch.float16),  # as EAGLE's scripts say it
    ]:
        model = EaModel.from_pretrained(str(tmp_path), head, total_token=12, depth=3, top_k=4, **options)
        assert model.dtype == model.ea_layer.fc.weight.dtype == dtype
        assert model.generate("hello", max_new_tokens=6).new_tokens == 6


def test_relaxation_threshold_is_the_margin_rule(model: EaModel) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    by_threshold = model.eagenerate(ids, max_new_tokens=30, relaxation_threshold=0.7)
    by_config = model.eagenerate(ids, max_new_tokens=30, verify=VerifyConfig(theta=0.7))
    assert torch.equal(by_threshold, by_config)
    assert not torch.equal(by_threshold, model.eagenerate(ids, max_new_tokens=30, relaxation_threshold=None))


# --- generate and stream ---


def test_result_counts_add_up(model: EaModel) -> None:
    result = model.generate("hello", max_new_tokens=40, verify=VerifyConfig(theta=0.7))
    assert result.new_tokens == len(result.provenance) == 40
    assert result.cycles == len(result.accepted_lengths)
    assert result.tau == sum(n + 1 for n in result.accepted_lengths) / result.cycles
    # The first token comes from prefill, and the last one may need no draft; neither is a cycle's.
    assert sum(n + 1 for n in result.accepted_lengths) >= 38
    assert result.relaxed == result.provenance.count("relaxed") > 0
    assert result.exact_prefix_tokens == result.provenance.index("relaxed")
    assert result.regret > 0
    assert "".join(text for text, _ in result.pieces) == result.text
    assert result.seconds == result.prefill_seconds + result.decode_seconds > 0
    assert result.guarantee.startswith("Lossy")
    assert model.generate("hello", max_new_tokens=4, verify=EXACT).guarantee.startswith("Lossless")


def test_stream_gives_the_same_text_as_generate(model: EaModel) -> None:
    stream = model.stream("hello", max_new_tokens=40, verify=EXACT)
    text = "".join(piece.text for piece in stream)
    assert text == stream.result.text == model.generate("hello", max_new_tokens=40, verify=EXACT).text


def test_closed_stream_has_no_result(model: EaModel) -> None:
    stream = model.stream("hello", max_new_tokens=40)
    next(iter(stream))
    stream.close()
    with pytest.raises(RuntimeError, match="closed"):
        _ = stream.result


def test_stop_string_ends_text_and_tokens(model: EaModel) -> None:
    free = model.generate("hello", max_new_tokens=40, verify=EXACT)
    whole = free.text
    stop = whole[10:12]
    cut = model.generate("hello", max_new_tokens=40, verify=EXACT, stop=[stop])
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: cut.new_tokens]


def test_every_stop_id_of_tokenizer_and_generation_config_counts(tiny_pair) -> None:
    model = EaModel.from_pretrained(*tiny_pair, total_token=12, depth=3, top_k=4)
    free = model.generate("hello", max_new_tokens=40, verify=EXACT)
    base = model.base_model
    base.generation_config.eos_token_id = [free.token_ids[20], free.token_ids[5]]
    again = EaModel(base, model.tokenizer, model.ea_layer, model.draft)
    cut = again.generate("hello", max_new_tokens=40, verify=EXACT)
    first = min(free.token_ids.index(i) for i in base.generation_config.eos_token_id)
    assert cut.token_ids == free.token_ids[: first + 1]
    assert cut.finish_reason == "stop"


def test_the_baseline_is_the_same_text(model: EaModel) -> None:
    base = model.generate("hello", max_new_tokens=30, method="autoregressive")
    assert base.token_ids == model.generate("hello", max_new_tokens=30, verify=EXACT).token_ids
    assert base.cycles == 0


def test_relaxation_is_announced_once_in_words(model: EaModel, caplog) -> None:
    verify = VerifyConfig(theta=0.77)
    with caplog.at_level(logging.INFO, logger="eagle_mars"):
        model.generate("hello", max_new_tokens=2, verify=verify)
        model.generate("hello", max_new_tokens=2, verify=verify)
    assert len([r for r in caplog.records if "Lossy" in r.message and "0.77" in r.message]) == 1


def test_chat_ids_end_where_the_assistant_begins(model: EaModel) -> None:
    text = model.tokenizer.decode(model.chat_ids("hi"))
    assert text == "<|user|>hi<|end|><|assistant|>"


def test_what_eagles_scripts_pass_is_taken(tiny_pair) -> None:
    EaModel.from_pretrained(*tiny_pair, total_token=12, depth=3, top_k=4, load_in_8bit=False, load_in_4bit=False)
    with pytest.raises(ConfigError, match="quantization_config"):
        EaModel.from_pretrained(*tiny_pair, total_token=12, depth=3, top_k=4, load_in_8bit=True)


def test_a_vanishing_top_p_is_off_as_in_eagle(model: EaModel) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    common = {"temperature": 1.0, "max_new_tokens": 16, "seed": 3}
    assert torch.equal(model.eagenerate(ids, top_p=1e-9, **common), model.eagenerate(ids, top_p=0.0, **common))


def test_index_of_the_last_cycle(model: EaModel) -> None:
    ids = model.tokenizer("hello", return_tensors="pt").input_ids
    _, new_token, idx = model.naivegenerate(ids, max_new_tokens=9, log=True)
    assert (new_token, idx) == (9, 8)


def test_one_stop_string_may_be_a_plain_string(model: EaModel) -> None:
    whole = model.generate("hello", max_new_tokens=40, verify=EXACT).text
    cut = model.generate("hello", max_new_tokens=40, verify=EXACT, stop=whole[10:13])
    assert cut.text == whole[: whole.index(whole[10:13])]


def test_the_home_directory_is_expanded(tiny_pair, monkeypatch) -> None:
    target, head = Path(tiny_pair[0]), Path(tiny_pair[1])
    monkeypatch.setenv("HOME", str(target.parent))
    EaModel.from_pretrained(f"~/{target.name}", f"~/{head.name}", total_token=12, depth=3, top_k=4)


# --- mistakes ---


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"prompt": ""}, ConfigError, "prompt is empty"),
        ({"prompt": []}, ConfigError, "prompt is empty"),
        ({"prompt": torch.ones(2, 3, dtype=torch.long)}, ConfigError, "2 rows"),
        ({"prompt": [5, 100_000]}, ConfigError, "outside 0.."),
        ({"max_new_tokens": 0}, ConfigError, "max_new_tokens=0"),
        ({"max_new_tokens": -3}, ConfigError, "max_new_tokens=-3"),
        ({"max_new_tokens": 2000}, ContextLengthError, "lower max_new_tokens to 1019"),
        ({"prompt": [5] * 1024}, ContextLengthError, "shorten the prompt"),
        ({"method": "magic"}, ConfigError, "autoregressive"),
        ({"stop": ["", "x"]}, ConfigError, "stop string is empty"),
        ({"prompt": ["two", "texts"]}, ConfigError, "neither text nor a row of ids"),
        ({"prompt": [[1, 2], [3]]}, ConfigError, "neither text nor a row of ids"),
    ],
)
def test_a_mistake_is_one_sentence(model: EaModel, options: dict, error: type, sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        model.generate(**{"prompt": "hello", "max_new_tokens": 8, **options})


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: VerifyConfig(theta=0), "theta"),
        (lambda: VerifyConfig(theta=1.01), "theta"),
        (lambda: VerifyConfig(theta=float("nan")), "theta"),
        (lambda: VerifyConfig(margin="logit-gap"), "needs gap in nats"),
        (lambda: VerifyConfig(gap=1.0), "read with margin='logit-gap' only"),
        (lambda: SamplingConfig(seed=2**63), "seed"),
        (lambda: VerifyConfig(tehta=0.9), "no option 'tehta'"),
        (lambda: SamplingConfig(temprature=1), "no option 'temprature'"),
        (lambda: SamplingConfig(temperature=-1), "temperature"),
        (lambda: SamplingConfig(temperature=float("inf")), "temperature"),
        (lambda: SamplingConfig(top_p=0), "top_p"),
        (lambda: DraftConfig(total_token=100, depth=1, top_k=2), "only 7 nodes are reachable"),
        (lambda: DraftConfig(total_token=1), "total_token"),
        (lambda: DraftConfig(top_k=0), "top_k"),
        (lambda: DraftConfig().replace(depth=-1), "depth"),
    ],
)
def test_options_are_checked_when_built(build, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build()


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        VerifyConfig().theta = 0.5


def test_missing_paths(tiny_pair, tmp_path: Path) -> None:
    target, head = tiny_pair
    with pytest.raises(CheckpointError, match=r"no target at .*nowhere: no such directory"):
        EaModel.from_pretrained(str(tmp_path / "nowhere"), head)
    with pytest.raises(CheckpointError, match="nowhere"):
        EaModel.from_pretrained(target, str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="config"):
        EaModel.from_pretrained(str(tmp_path), head)


def test_a_hub_id_without_a_network(tiny_pair) -> None:
    with pytest.raises(CheckpointError, match="some-owner/some-model"):
        EaModel.from_pretrained("some-owner/some-model", tiny_pair[1])


def test_damaged_and_incomplete_targets(tmp_path: Path, tiny_pair) -> None:
    vocab = save_tokenizer(tmp_path)
    model = tiny_model("Llama", vocab_size=vocab)
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="can't load the target"):
        EaModel.from_pretrained(str(tmp_path), tiny_pair[1])
    state = model.state_dict()
    del state["model.layers.3.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"no fitting weights for model.layers.3.mlp.up_proj.weight"):
        EaModel.from_pretrained(str(tmp_path), tiny_pair[1])


def test_a_head_of_another_target_is_refused_with_the_numbers(tmp_path: Path, tiny_pair) -> None:
    target, _ = tiny_pair
    save_head(tmp_path / "wide", tiny_model("Llama", hidden_size=64, vocab_size=260))
    with pytest.raises(CheckpointError, match=r"64.*32"):
        EaModel.from_pretrained(target, str(tmp_path / "wide"))
    save_head(tmp_path / "vocabulary", tiny_model("Llama", vocab_size=96))
    with pytest.raises(CheckpointError, match=r"96.*260"):
        EaModel.from_pretrained(target, str(tmp_path / "vocabulary"))


def test_an_unfit_architecture_is_refused(tmp_path: Path, tiny_pair) -> None:
    save_tokenizer(tmp_path)
    tiny_model("Mistral", sliding_window=16, vocab_size=260).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedTargetError, match="sliding window of 16"):
        EaModel.from_pretrained(str(tmp_path), tiny_pair[1])


def test_a_target_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = tiny_model("Llama")
    with pytest.raises(UnsupportedTargetError, match="no weights"):
        refuse_unfit(model)


def test_a_wrong_field_in_the_config(tmp_path: Path, tiny_pair) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    with pytest.raises(CheckpointError, match="config"):
        EaModel.from_pretrained(str(tmp_path), tiny_pair[1])


def test_what_the_chat_template_refuses_is_said(model: EaModel, monkeypatch) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ raise_exception('System role not supported') }}")
    with pytest.raises(ConfigError, match="System role not supported"):
        model.chat_ids("hi")


def test_no_chat_template_is_said(model: EaModel, monkeypatch) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="chat template"):
        model.chat_ids("hi")


def test_wrong_family_flag_is_logged_and_harmless(tiny_pair, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        EaModel.from_pretrained(*tiny_pair, total_token=12, depth=3, top_k=4, use_eagle3=False)
    assert "Eagle3Head" in caplog.text
